"""3DGEER (arXiv 2505.24053): Gaussians rendered by their exact integral along every ray, for any camera."""
