"""Two texts that a trained model of English or of code predicts well, written for this purpose.

They are deliberately ordinary, with nothing of this project.
"""

from collections.abc import Callable, Mapping
from typing import Any

USUAL = 512  # default tokens of a text under each reading
FEW = 128  # the same for large models
SMALL = 10**8  # parameters up to which ``USUAL`` is the default
PIECES = 2  # number of pieces of a user's text, like the default texts


def usual(parameters: int) -> int:
    """The default tokens of a text; fewer for large models, which take minutes in float64."""
    return max(FEW, USUAL * SMALL // max(SMALL, parameters))


def pieces(
    content: str | None, tokens: int, least: int, tokenizer: Callable[[str], Mapping[str, Any]]
) -> list[list[int]]:
    """Token ids of texts, at most ``tokens`` of each, without texts shorter than ``least``.

    Args:
        content: the user's text; None for the default texts.
        tokens: the maximum tokens of a text; 0 for no text.
        least: the minimum tokens of a text.
        tokenizer: a tokenizer of transformers.
    """
    if not tokens:
        return []
    if content is None:
        lists = [tokenizer(text)["input_ids"][:tokens] for text in (PROSE, CODE)]
    else:
        ids = tokenizer(content)["input_ids"]
        lists = [ids[start : start + tokens] for start in range(0, len(ids), tokens)][:PIECES]
    return [ids for ids in lists if len(ids) >= least]


PROSE = """\
It was a cold morning at the end of November, and the first snow had fallen during the night. Anna
stood at the kitchen window with a cup of tea in her hands and looked out at the garden. The old
apple tree was white, and so were the roof of the shed and the path that led down to the river. A
small brown bird sat on the fence and did not move.

"Did you sleep well?" her mother asked as she came in from the hall.

"Not really," said Anna. "I kept thinking about the letter. What if he does not come after all?"

"He will come. He has never broken a promise in his life, and he knows how much it means to you."

Her mother put some bread on the table and sat down. For a while neither of them said anything. The
clock on the wall ticked, and the fire in the stove made the room warm. Outside, a dog was barking
at the other end of the village, and somewhere a door was opened and closed again.

They had not seen her brother for almost three years. He had gone to the city to look for work when
he was only twenty, with one suitcase and a little money that their uncle had lent him. At first he
had written every week. Then the letters became shorter, and in the last year there had been only
two of them, one at Easter and one in the summer. But ten days ago a third one had arrived. He had
found a better job, he wrote, and he would be home for a few days before Christmas. The train would
be there on Saturday at about ten o'clock.

At half past nine they put on their coats and their boots and walked to the station together. It
was not far, but the snow was deep in some places, and they had to go slowly. There were not many
people on the platform: an old man with a newspaper, a young woman with two children, and the man
who sold the tickets. The children were throwing snowballs at each other and laughing.

"There it is!" one of them shouted.

Anna looked up. Far away, between the dark trees, she saw the white smoke of the train. It came
closer and closer, until at last it stopped in front of them with a long hiss. The doors opened.
For a moment she could not see anything because of the steam, and her heart was beating so fast
that she could hear it. Then she saw a tall man in a grey coat, who put down his bag and smiled.

"Hello, little sister," he said. "You have grown up while I was away."
"""

CODE = '''\
"""Read and write simple configuration files."""

import os
import re
import sys

__all__ = ["Error", "Config", "load", "save"]


class Error(Exception):
    """Base class for exceptions in this module."""

    def __init__(self, message, lineno=None):
        self.message = message
        self.lineno = lineno
        Exception.__init__(self, message)

    def __str__(self):
        if self.lineno is None:
            return self.message
        return "line %d: %s" % (self.lineno, self.message)


class Config:
    """A dictionary of options, by the names of their sections."""

    def __init__(self, defaults=None):
        self._sections = {}
        self._defaults = {}
        if defaults is not None:
            for key, value in defaults.items():
                self._defaults[key] = value

    def __len__(self):
        return len(self._sections)

    def __contains__(self, section):
        return section in self._sections

    def __repr__(self):
        return "<%s with %d sections>" % (self.__class__.__name__, len(self))

    def sections(self):
        """Return a list of section names."""
        return list(self._sections.keys())

    def add_section(self, section):
        """Create a new section.

        Raise ValueError if a section by the specified name already exists.
        """
        if section in self._sections:
            raise ValueError("Section %r already exists" % section)
        self._sections[section] = {}

    def get(self, section, option, default=None):
        """Get an option value for a given section."""
        try:
            return self._sections[section][option]
        except KeyError:
            return self._defaults.get(option, default)

    def set(self, section, option, value):
        """Set an option."""
        if not isinstance(value, str):
            raise TypeError("option values must be strings")
        self._sections[section][option] = value

    def read(self, filename, encoding=None):
        """Read and parse a file."""
        with open(filename, encoding=encoding) as f:
            self._read(f)

    def _read(self, fp):
        section = None
        for lineno, line in enumerate(fp, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            match = re.match(r"\\[(.+)\\]$", line)
            if match:
                section = match.group(1)
                if section not in self._sections:
                    self.add_section(section)
            elif "=" in line:
                if section is None:
                    raise Error("option without a section", lineno)
                key, value = line.split("=", 1)
                self._sections[section][key.strip()] = value.strip()
            else:
                raise Error("bad syntax", lineno)

    def write(self, fp):
        """Write the options to a file object."""
        for section, options in self._sections.items():
            fp.write("[%s]\\n" % section)
            for key, value in options.items():
                fp.write("%s = %s\\n" % (key, value))
            fp.write("\\n")


def load(filename):
    config = Config()
    if os.path.exists(filename):
        config.read(filename)
    return config


def main(args=None):
    if args is None:
        args = sys.argv[1:]
    for filename in args:
        try:
            config = load(filename)
        except (OSError, Error) as e:
            print("%s: %s" % (filename, e), file=sys.stderr)
            return 1
        config.write(sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''
