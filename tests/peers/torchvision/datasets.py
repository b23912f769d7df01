"""The name that mosaicml-streaming derives a class from."""


class VisionDataset:
    pass
