"""Every command of docs/runbooks works, in the trouble that its page is for."""

import os
import pathlib
import re
import signal
import subprocess
import time
import urllib.parse

import redis

from support import LANEBRIDGE, ROOT, WithDatabase, address

PAGES = ROOT / "docs" / "runbooks"
DEADLINE = 30


def commands(page):
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (PAGES / page).read_text(), re.S | re.M)
    return [line.strip() for block in blocks for line in block.splitlines()]


class Runbooks(WithDatabase):
    def setUp(self):
        url = address("LB_REDIS_URL")
        self.stream = f"runbook-{os.getpid()}-{time.monotonic_ns()}"
        self.configuration = f"""
            [bridge]
            poll_interval = "100ms"
            [sinks.streams]
            type = "redis"
            url = "{url}"
            [handlers.search]
            events = ["order.*"]
            sink = "streams"
            stream = "{self.stream}-{{key}}"
            retry = {{ max_attempts = 1 }}
        """
        super().setUp()
        self.redis = redis.Redis.from_url(url)
        self.addCleanup(self.redis.close)
        self.addCleanup(lambda: self.redis.delete(f"{self.stream}-ada", f"{self.stream}-ben"))
        # No stream, so that the first delivery of the key dies and the others wait behind it.
        self.redis.set(f"{self.stream}-ada", "taken")
        for key in ("ada", "ada", "ben"):
            self.lanebridge("publish", "order.paid", "--payload", "p", "--key", key)
        self.lanebridge("run", "--once")
        self.assertEqual(self.states(), ["dead", "blocked"])

    def states(self):
        return [line.split()[2] for line in self.lanebridge("deliveries", "list").splitlines()[1:]]

    def follow(self, page, only="", **words):
        """Does what the page says, each command on its own, with the words in capitals filled in; or those with `only`."""
        words = {"HANDLER": "search", "KEY": "ada", "SEQ": "1", **words}
        path = f"{LANEBRIDGE.parent}:{address('LB_PG_BIN')}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "LANEBRIDGE_CONFIG": str(self.file), "DB": self.url}
        followed = [command for command in commands(page) if only in command]
        self.assertTrue(followed, page)
        for command in followed:
            command = re.sub(r"\b[A-Z]{3,}\b", lambda word: str(words.get(word[0], word[0])), command)
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=DEADLINE)
            # Finding a problem is what doctor is asked for.
            found = command == "lanebridge doctor" and re.search(r"lanebridge: \d+ problem", done.stderr)
            self.assertTrue(done.returncode == 0 or found, f"{page}: {command}\n{done.stdout}{done.stderr}")

    def eventually(self, what, ask):
        end = time.monotonic() + DEADLINE
        while not ask():
            self.assertLess(time.monotonic(), end, what)

    def test_readme(self):
        self.follow("README.md")
        pages = {page.name for page in PAGES.glob("*.md")} - {"README.md"}
        self.assertEqual(pages, set(re.findall(r"\]\((\w[\w-]*\.md)\)", (PAGES / "README.md").read_text())))

    def test_broker_down(self):
        self.follow("broker-down.md")

    def test_dead_deliveries(self):
        self.redis.delete(f"{self.stream}-ada")
        self.follow("dead-deliveries.md")
        self.lanebridge("run", "--once")
        self.assertEqual(self.states(), [])
        self.assertEqual(self.redis.xlen(f"{self.stream}-ada"), 2)

    def test_blocked_key(self):
        self.redis.delete(f"{self.stream}-ada")
        self.follow("blocked-key.md", only="requeue")
        self.lanebridge("run", "--once")
        self.assertEqual(self.states(), [])
        self.assertEqual(self.redis.xlen(f"{self.stream}-ada"), 2)

    def test_blocked_key_that_is_given_up(self):
        self.redis.delete(f"{self.stream}-ada")
        self.follow("blocked-key.md")
        self.assertEqual(self.query("select changed from lanebridge.audit where action = 'skip'"), [(1,)])
        self.lanebridge("run", "--once")
        self.assertEqual(self.states(), [])
        self.assertEqual(self.redis.xlen(f"{self.stream}-ada"), 1)

    def test_stuck_lane(self):
        bridge = subprocess.Popen([LANEBRIDGE, "-c", self.file, "run"], stderr=subprocess.DEVNULL)
        self.addCleanup(bridge.wait)
        self.addCleanup(bridge.kill)
        owned = "select count(*) from lanebridge.lanes where epoch is not null"
        self.eventually("the bridge owns all lanes", lambda: self.query(owned) == [(256,)])
        ((epoch,),) = self.query("select epoch from lanebridge.bridges where fenced_at is null")
        bridge.send_signal(signal.SIGSTOP)
        self.follow("stuck-lane.md", PID=0, EPOCH=epoch)
        locks = "select count(*) from pg_locks l join lanebridge.bridges b on b.lock_pid = l.pid where l.locktype = 'advisory'"
        self.eventually("its locks are free", lambda: self.query(locks) == [(0,)])

    def test_failover(self):
        self.follow("failover.md")
        self.assertGreater(int(self.lanebridge("publish", "order.paid", "--payload", "p")), 1_000_000)

    def test_restore_from_backup(self):
        before = self.query("select id from lanebridge.installation")
        self.follow("restore-from-backup.md")
        self.assertEqual(self.states(), [])
        self.assertNotEqual(self.query("select id from lanebridge.installation"), before)

    def test_upgrade(self):
        self.follow("upgrade.md")
