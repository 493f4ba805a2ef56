"""What stands around a handler: deserializers, middleware, and handlers of dead letters."""
