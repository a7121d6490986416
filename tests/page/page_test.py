#!/usr/bin/env python3
"""The coordinator's page in Chromium, over 10,000 jobs of which one has done a million steps.

page_test.py PAGE-DEMO. RINGLEADER_SCREENSHOTS names a folder that keeps what the browser showed."""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import browser

DEMO = sys.argv[1]
PICTURES = pathlib.Path(os.environ.get("RINGLEADER_SCREENSHOTS", tempfile.mkdtemp()))
LONG = "#/jobs/qwen3b-512k"
IN_FULL = "document.querySelectorAll('main svg').length == 10"


class Page(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.demo = subprocess.Popen([DEMO, cls.folder.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cls.address = cls.demo.stdout.readline().strip()
        cls.browser = browser.Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.demo.stdin.close()
        cls.demo.wait(timeout=60)
        cls.demo.stdout.close()
        cls.folder.cleanup()

    def setUp(self):
        self.browser.complaints.clear()
        self.browser.requests.clear()
        self.browser.look(1280, 900)

    def tearDown(self):
        self.browser.evaluate("1")  # what it had to say until now
        self.assertEqual(self.browser.complaints, [])
        for url in self.browser.requests:
            self.assertTrue(url.startswith((self.address + "/", "about:")), url)

    def open(self, view, until):
        self.browser.open(f"{self.address}/{view}")
        self.browser.wait_for(until)

    def await_words(self, words, times=1):
        """Parts of a view, its log last, come one after the other."""
        self.browser.wait_for(f"document.body.innerText.split({json.dumps(words)}).length > {times}")

    def text(self):
        return self.browser.evaluate("document.body.innerText")

    def test_jobs_are_paged_and_filtered(self):
        rows = "document.querySelectorAll('table[aria-label=Jobs] tbody tr')"
        self.open("", f"{rows}.length == 50")
        self.assertIn("10,000 jobs", self.text())
        self.assertIn("needs 16 trainers with GPUs on at most 2 nodes", self.text())
        first = self.browser.evaluate(f"{rows}[0].innerText")
        self.browser.evaluate("[...document.querySelectorAll('button')].find((b) => b.textContent == 'Older').click()")
        self.browser.wait_for(f"{rows}[0].innerText != {first!r}")
        self.browser.evaluate("""(() => {
            const select = document.querySelector('select');
            select.value = 'RUNNING';
            select.dispatchEvent(new Event('change'));
        })()""")
        self.browser.wait_for(f"{rows}.length == 1")
        self.browser.evaluate("""(() => {
            const input = document.querySelector('input');
            input.value = 'colour=red';
            input.dispatchEvent(new Event('change'));
        })()""")
        self.browser.wait_for("!document.querySelector('[role=alert]').hidden")
        self.assertIn("expected state, name, owner", self.text())
        self.browser.complaints.clear()  # of the answer 400, which was wanted

    def test_a_long_job_is_drawn_from_few_points(self):
        began = time.monotonic()
        self.open(LONG, IN_FULL)
        print(f"a job of a million steps was there after {time.monotonic() - began:.2f} s")
        points = self.browser.evaluate(
            "document.querySelector('path.series').getAttribute('d').split(/[ML]/).length - 1")
        self.assertEqual(points, 400)
        for words in ("alice, project ocean", "750,000 / 1,000,000", "Stripes of 64 tokens", "gpu-02 (ranks 8 to 15)",
                      "flat 16 × 1", "Plan 3 was not taken up at step 300,160", "Plan 4 from step 300,320: striped, stripes of 128",
                      "Rank 11 on gpu-02 is slow: 1.18 times", "uncorrectable ECC error", "NCCL WARN socket buffer", "Checkpoints kept: steps 747,000"):
            self.await_words(words)

    def test_texts_stay_texts(self):
        for view in ("#/jobs/hostile", "#/nodes", ""):
            self.open(view, "document.querySelector('table')")
            self.assertNotIn("owned", self.browser.evaluate("document.title"))
            self.assertEqual(self.browser.evaluate("document.querySelectorAll('img, main script').length"), 0)
        self.open("#/jobs/hostile", "document.querySelector('.log div')")
        self.await_words("<script>document.title='owned'</script>", times=4)

    def test_everything_has_a_name(self):
        for view, until in (("", "document.querySelector('table')"), (LONG, IN_FULL),
                            ("#/nodes", "document.querySelector('table')")):
            self.open(view, until)
            for role, name in self.browser.names():
                if role in ("image", "link", "button", "combobox", "searchbox", "spinbutton", "table", "region", "log",
                            "progressbar", "navigation"):
                    self.assertTrue(name.strip(), f"{view}: a {role} has no name")
        images = [name for role, name in self.browser.names() if role == "image"]
        self.open(LONG, IN_FULL)
        images = [name for role, name in self.browser.names() if role == "image"]
        self.assertEqual(len(images), 10, images)
        self.assertIn("Loss: training 9.", images[0])
        self.assertIn("Density by layer: 36 layers over steps 1 to ", images[4])
        self.assertIn("Probed recall by layer: 36 layers over steps 1 to ", images[6])
        self.assertIn("Recall by layer and head: 36 layers over heads 0 to 15; of attention mass kept at step 750000",
                      images[7])

    def test_it_is_live_and_says_when_it_is_not(self):
        self.open("#/nodes", "document.getElementById('status').textContent == 'Live'")
        asked = lambda: sum("/api/nodes" in url for url in self.browser.requests)
        self.browser.requests.clear()
        deadline = time.monotonic() + 60
        while asked() < 2 and time.monotonic() < deadline:
            self.browser.wait_for("new Promise((done) => setTimeout(() => done(true), 200))")
        self.assertGreaterEqual(asked(), 2)
        self.browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1,
                          uploadThroughput=-1)
        self.browser.wait_for("document.getElementById('status').textContent == 'The coordinator does not answer'")
        self.browser.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1,
                          uploadThroughput=-1)
        self.browser.wait_for("document.getElementById('status').textContent == 'Live'")
        self.browser.complaints.clear()  # of the network, which was taken away

    def test_it_fits_its_window_in_light_and_dark(self):
        sizes = {}
        for view, name, until in (("", "jobs", "document.querySelector('table')"), (LONG, "job", IN_FULL),
                                  ("#/nodes", "nodes", "document.querySelector('table')")):
            for width in (1280, 400):
                for dark in (False, True):
                    self.browser.look(width, 900, dark)
                    self.open(view, until)
                    wide = self.browser.evaluate("document.documentElement.scrollWidth")
                    self.assertLessEqual(wide, width, f"{name} at {width}")
                    cut = self.browser.evaluate("[...document.querySelectorAll('.scroll')]"
                                                ".filter((e) => e.scrollWidth > e.clientWidth).length")
                    self.assertEqual(cut, 0, f"{name} at {width}: a table is wider than its place")
                    path = PICTURES / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                    self.browser.screenshot(path)
                    picture = path.read_bytes()
                    self.assertEqual(struct.unpack(">I", picture[16:20])[0], width)
                    sizes[name, width, dark] = picture
                self.assertNotEqual(sizes[name, width, False], sizes[name, width, True])


if __name__ == "__main__":
    if browser.CHROMIUM is None:
        print("SKIPPED: Chromium is not installed; deploy/install_deps.sh --dev installs it")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1])
