"""The snippets of docs/publishing.md do what the page says."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from support import ROOT, WithDatabase, address

PAGE = ROOT / "docs" / "publishing.md"
NODE_MODULES = ROOT / "target" / "snippets"


def snippet(language):
    found = re.search(rf"<!-- test: {language} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S)
    if not found:
        raise AssertionError(f"{PAGE.name} has no snippet marked {language}")
    return found.group(1)


class Snippets(WithDatabase):
    def run_with(self, argv, text, suffix, **environment):
        self.execute("create table orders (id bigint primary key, customer text not null, state text not null)")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / ("snippet" + suffix)
            file.write_text(text)
            environment = {**os.environ, "DATABASE_URL": self.url, **environment}
            done = subprocess.run([*argv, file], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)

    def check(self, order, key):
        events = self.query("select type, key, id, headers, convert_from(payload, 'UTF8')::jsonb ->> 'order' "
                            "from lanebridge.events order by seq")
        self.assertEqual([event[0] for event in events], ["order.placed", "order.paid", "order.packed"],
                         "and the one that was rolled back is not there")
        self.assertEqual({event[1] for event in events}, {key})
        self.assertEqual(events[0][2], f"order-{order}-placed")
        self.assertTrue(events[0][3], "headers")
        self.assertEqual({event[4] for event in events}, {str(order)})
        self.assertEqual(self.query("select id from orders"), [(order,)])

    def test_psql(self):
        psql = pathlib.Path(address("LB_PG_BIN")) / "psql"
        self.run_with([psql, self.url, "-q", "-v", "ON_ERROR_STOP=1", "-f"], snippet("psql"), ".sql")
        self.check(1, "ada")

    def test_python(self):
        self.run_with([sys.executable], snippet("python"), ".py")
        self.check(11, "ben")

    def test_node(self):
        for program in ("node", "npm"):
            if not shutil.which(program):
                raise AssertionError(f"{program} is missing; run: scripts/services build-deps")
        if not (NODE_MODULES / "node_modules" / "pg").exists():
            subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", NODE_MODULES, "pg@8"],
                           check=True, stdout=subprocess.DEVNULL)
        self.run_with(["node"], snippet("node"), ".js", NODE_PATH=str(NODE_MODULES / "node_modules"))
        self.check(21, "cleo")
