"""What policies take and return, all frozen: units, partitions, snapshots, plans."""
