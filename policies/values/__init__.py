"""What policies are told and what they answer, as frozen values."""
