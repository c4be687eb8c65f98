"""No name, comment, message or document uses a word that this project has a better one for."""

from tests import words


def test_plain_words() -> None:
    found = [str(use) for path in words.files() for use in words.uses(path)]
    assert not found, "\n".join(["python -m tests.words lists them:", *found])


def test_a_name_is_read_by_its_parts() -> None:
    (use,) = words.uses_in("example.py", [(3, "self.was_told_so".replace("_", " "))])
    assert (use.line, use.word) == (3, "told")
