"""The one kind of error that the user of the trainer causes and can mend."""

EXIT_USAGE = 64  # EX_USAGE of sysexits.h: the command was used incorrectly


class SettingError(ValueError):
    """A setting is wrong; the message names it and says what to do."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        """Say which setting is wrong, how, and what would be right."""
        super().__init__(f"setting `{name}`: {problem}. {remedy}.")
        self.name = name
