"""Used by every part of the host side: spec files, and the owners of temporary folders."""
