"""Acting: networks evaluated for many actors at once, in this process or in others."""
