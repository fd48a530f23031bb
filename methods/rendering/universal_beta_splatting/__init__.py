"""Universal Beta Splatting (arXiv 2510.03312): radiance fields of N-dimensional Beta kernels."""
