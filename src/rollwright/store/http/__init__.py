"""A store over HTTP: the server that offers any store, and the client that is a store."""
