"""An engine's part in the protocol. No model library is imported here."""
