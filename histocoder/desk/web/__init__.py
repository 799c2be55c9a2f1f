"""The desk's server and page: who may ask, the routes to the domain, and the answers in HTTP."""
