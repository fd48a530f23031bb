"""What the splatting systems share: tiles, losses, densifiers, spherical harmonics, maps of a rendered image."""
