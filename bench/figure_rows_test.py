"""Which rows of a figures' file stay when some are measured anew."""

import json
import pathlib
import tempfile
import unittest

from figure_rows import write_rows


def row(name, value, command="one"):
    return {"row": name, "value": value, "command": command}


class WriteRowsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "figures" / "rows.json"
        write_rows([row("a", 1), row("b", 2), row("c", 3, "two")], self.path)

    def values(self):
        return {row["row"]: row["value"] for row in json.loads(self.path.read_text())}

    def test_rows_take_the_place_of_those_of_their_names(self):
        write_rows([row("a", 10), row("d", 4)], self.path)
        self.assertEqual(self.values(), {"a": 10, "b": 2, "c": 3, "d": 4})

    def test_what_a_command_makes_no_more_goes_and_others_stay(self):
        write_rows([row("a", 10)], self.path, all_of="one")
        self.assertEqual(self.values(), {"a": 10, "c": 3})


if __name__ == "__main__":
    unittest.main()
