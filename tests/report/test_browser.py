"""The page in a real browser: Debian's Chromium, without a screen.

Screenshots of what was tested are left in ``.cache/screenshots``.
"""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from capsule.report.page import report_page
from tests.report.conftest import different, make_report, read
from tests.report.runs import hostile_bundle

HERE = Path(__file__).parent
SCREENSHOTS = HERE.parents[1] / ".cache" / "screenshots"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = {"phone": 320, "tablet": 768, "desktop": 1280}
MAX_HEIGHT = 12_000
SECONDS = 600  # that a script in a page may take on a busy machine


class Browser:
    """Chromium, and what happened in it."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(SECONDS)

    def show(self, path, *, width=1280, dark=False):
        """Open a page at a width, after forgetting what was logged before."""
        self.log("browser")
        self.log("performance")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get(path.as_uri())

    def command(self, name, **options):
        return self.driver.execute_cdp_cmd(name, options)

    def run(self, script):
        """Run a script in the page, whose policy does not bind the browser's driver."""
        return self.driver.execute_script(script)

    def log(self, kind):
        return self.driver.get_log(kind)

    def requested(self):
        """Return the addresses that the page asked for; a browser opens with one of its own."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        page = self.driver.current_url
        return [each["request"]["url"] for each in sent if each["documentURL"] == page]

    def save(self, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, MAX_HEIGHT), "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with a profile of its own; without Chromium this fails, it is never skipped."""
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.driver.quit()


@pytest.fixture(scope="module")
def page(bundles, tmp_path_factory) -> Path:
    """A page with all parts: two re-executions, one of which differs, and nobody trusted."""
    folder = tmp_path_factory.mktemp("page")
    subject = read(bundles["impala"])
    for name, report in {"same": make_report(subject), "other": different(subject)}.items():
        (folder / f"{name}.json").write_text(report.model_dump_json(by_alias=True))
    reports = (folder / "same.json", folder / "other.json")
    path = folder / "report.html"
    path.write_text(report_page(read(bundles["impala"], *reports, trusted=False)))
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "report.html"
    path.write_text(report_page(read(hostile_bundle(folder))))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", WIDTHS)
def test_the_page_fits_and_loads_nothing(browser, page, name, dark):
    browser.show(page, width=WIDTHS[name], dark=dark)
    assert browser.log("browser") == []
    assert browser.requested() == [page.as_uri()]
    assert browser.run("return document.documentElement.scrollWidth") <= WIDTHS[name]
    text = browser.driver.find_element(By.TAG_NAME, "body").text
    for words in ("not always reproduced", "Untrusted.", "Evaluation: pong", "sha256sum --strict"):
        assert words in text
    browser.save(f"{name}-{'dark' if dark else 'light'}")


def test_light_and_dark_are_two_looks(browser, page):
    looks = []
    for dark in (False, True):
        browser.show(page, dark=dark)
        style = "getComputedStyle(document.body)"
        looks.append(browser.run(f"return [{style}.backgroundColor, {style}.color]"))
    assert looks[0] != looks[1]


def test_curves_of_two_runs_differ_in_more_than_colour(browser, page):
    browser.show(page)
    dashes = browser.run(
        "return ['s0', 's1', 's2', 's3'].map(name => {"
        " const line = document.querySelector('polyline.' + name);"
        " return line && getComputedStyle(line).strokeDasharray})"
    )
    drawn = [dash for dash in dashes if dash]
    assert len(drawn) == 3
    assert len(set(drawn)) == 3


@pytest.mark.slow
def test_the_verdict_is_on_the_first_printed_page(browser, page, tmp_path):
    browser.show(page)
    printed = browser.command("Page.printToPDF", preferCSSPageSize=True)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / "print.pdf"
    path.write_bytes(base64.b64decode(printed["data"]))
    first, whole = (
        subprocess.run(
            ["pdftotext", "-layout", *pages, path, "-"], capture_output=True, text=True, check=True
        ).stdout
        for pages in (["-l", "1"], [])
    )
    for words in ("not always reproduced", "What was shown", "What was not shown"):
        assert words in " ".join(first.split())
    assert "run/trace.jsonl" in whole  # folded on a screen


@pytest.mark.slow
def test_a_strangers_text_does_nothing(browser, hostile):
    browser.show(hostile, width=320)
    assert browser.log("browser") == []
    assert browser.requested() == [hostile.as_uri()]
    assert browser.run("return document.scripts.length + document.images.length") == 0
    assert (
        browser.run("return document.querySelectorAll('[onerror], [style], a, iframe').length") == 0
    )
    assert browser.run("return document.documentElement.scrollWidth") <= 320
    assert browser.driver.title == "hostile: Signed, not reproduced yet"
    assert "<script>alert(1)</script>" in browser.driver.page_source.replace("&lt;", "<").replace(
        "&gt;", ">"
    )
    browser.save("hostile")


@pytest.mark.slow
def test_even_a_script_in_the_page_would_not_run(browser, hostile, tmp_path):
    attack = "<script>document.title = 'ran'</script><p style='color: red'>x</p></body>"
    path = tmp_path / "attacked.html"
    path.write_text(hostile.read_text().replace("</body>", attack))
    browser.show(path)
    assert browser.driver.title == "hostile: Signed, not reproduced yet"
    refused = [entry["message"] for entry in browser.log("browser")]
    assert len(refused) == 2
    assert all("Content Security Policy" in message for message in refused)


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """The locked accessibility checker; without npm or a registry this fails."""
    folder = tmp_path_factory.mktemp("axe")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / "accessibility" / name, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=5")
    subprocess.run(["npm", "ci", *options], cwd=folder, check=True, capture_output=True)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.network
@pytest.mark.parametrize(("width", "dark"), [(320, True), (1280, False)])
def test_the_page_is_accessible(browser, page, axe, width, dark):
    browser.show(page, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.run(axe)
    found = browser.driver.execute_async_script("axe.run().then(arguments[0])")
    told = [
        (rule["id"], node["target"], node.get("failureSummary"))
        for rule in found["violations"]
        for node in rule["nodes"]
    ]
    assert told == []
    assert len(found["passes"]) > 20
