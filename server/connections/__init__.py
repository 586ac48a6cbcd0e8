"""What lies below the application: sockets, heads of requests, slow and dead clients."""
