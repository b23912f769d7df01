"""Stands in for torchvision, which the peers import but do not need for what the tests ask."""
