"""The other side of clients and commands: services whose answers tests script."""
