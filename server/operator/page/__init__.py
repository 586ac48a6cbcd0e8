"""The live page: the admin port's page in a browser, its events and its prompt box."""
