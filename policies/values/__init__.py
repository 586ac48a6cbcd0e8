"""The frozen values that policies take and return."""
