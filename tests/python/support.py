"""What the Python tests share: addresses, a database of its own for each test, and the bridge's binary."""

import os
import pathlib
import secrets
import subprocess
import tempfile
import unittest

import psycopg

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LANEBRIDGE = ROOT / "target" / "debug" / "lanebridge"


def address(name):
    value = os.environ.get(name)
    if not value:
        raise AssertionError(f"{name} is not set; run `scripts/services up` and load target/services/env, or `make test`")
    return value


class WithDatabase(unittest.TestCase):
    """A database with the schema migrated; `self.url` leads to it."""

    # Sinks and handlers for the configuration.
    configuration = ""

    def setUp(self):
        self.server = address("LB_POSTGRES_URL")
        self.name = "lb_py_" + secrets.token_hex(6)
        self.url = self.server.rsplit("/", 1)[0] + "/" + self.name
        self.admin(f"create database {self.name}")
        self.addCleanup(self.admin, f"drop database {self.name} with (force)")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name) / "lanebridge.toml"
        self.file.write_text(f'[postgres]\nurl = "{self.url}"\n[http]\nlisten = ""\n{self.configuration}')
        self.lanebridge("migrate")

    def admin(self, sql):
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(sql)

    def query(self, sql):
        with psycopg.connect(self.url) as connection:
            return connection.execute(sql).fetchall()

    def execute(self, sql):
        with psycopg.connect(self.url) as connection:
            connection.execute(sql)

    def lanebridge(self, *arguments):
        done = subprocess.run([LANEBRIDGE, "-c", self.file, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout
