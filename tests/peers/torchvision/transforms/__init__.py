"""Stands in for torchvision.transforms."""
