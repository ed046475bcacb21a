"""A bundle whose files a test may change after they were checked."""

from capsule.bundle.manifest import parse_document


class Files:
    """The files of a bundle, which a test may change after they were checked."""

    def __init__(self, files):
        self.files = files

    def member(self, path):
        return self.files[path]

    def read(self, path, model):
        return parse_document(self.files[path].read_bytes(), model, path, "CAP-B144")
