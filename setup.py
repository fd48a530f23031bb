"""Maps each top-level folder to a subpackage of the namespace package `papyrax` (everything else is in pyproject.toml)."""

from setuptools import find_namespace_packages, setup

FLOORS = ("jaxlib_ext", "methods", "envs", "train", "scripts")

packages, package_dir = [], {}
for floor in FLOORS:
    inside = find_namespace_packages(where=floor)
    packages += [f"papyrax.{floor}"] + [f"papyrax.{floor}.{name}" for name in inside]
    package_dir[f"papyrax.{floor}"] = floor

setup(packages=packages, package_dir=package_dir, package_data={"": ["py.typed", "*.xml", "*.json", "*.txt", "*.sh"]})
