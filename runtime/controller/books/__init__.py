"""What the controller knows: engines, requests, leases, demand, and what was counted."""
