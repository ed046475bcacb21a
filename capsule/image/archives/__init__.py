"""The formats that images are made of: layers, Debian packages, wheels."""
