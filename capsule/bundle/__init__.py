"""One file: claims, observations, manifest, archive, signatures, SBOM."""
