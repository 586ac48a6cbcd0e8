"""Which unit serves what: each policy is a pure function from a frozen snapshot to a plan."""
