"""Images in registries, by the OCI distribution specification 1.1."""
