"""What goes wrong with a target, as errors for its user."""


class TargetError(ValueError):
    """A target that cannot be loaded or used; the message says what is missing and what to do."""


class LoadRefused(TargetError):
    """A target that was read, but is not what its files say; `report` is the LoadReport with every finding."""

    def __init__(self, message: str, report):
        super().__init__(message)
        self.report = report
