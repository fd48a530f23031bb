"""REPPO: Relative Entropy Pathwise Policy Optimization (ICLR 2026, arXiv 2507.11019), and the PPO it is measured against."""
