"""What every part of the host side uses: errors, specs, output files, locks and words."""
