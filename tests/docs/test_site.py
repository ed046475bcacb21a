"""The documentation site, built as scripts/site.py builds it, in a real browser."""

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from scripts.site import broken_links
from tests.report.test_browser import Browser

ROOT = Path(__file__).parents[2]
SECONDS = 600
# The search is in a shadow tree of its own.
READY = "return Boolean(document.activeElement.shadowRoot?.activeElement?.matches('input'))"
FOUND = """
const tree = document.activeElement.shadowRoot;
return [...tree.querySelectorAll("a")].map(link => link.href);
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [sys.executable, "scripts/site.py", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(_Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    opened.driver.set_window_size(1280, 900)
    opened.driver.get("about:blank")
    opened.requested()  # by the page that a browser begins with
    yield opened
    opened.driver.quit()


@pytest.fixture(autouse=True)
def nothing_is_asked_of_other_machines(browser, address):
    """After each test: every request went to this machine, and nothing failed in the pages."""
    yield
    asked = [url for url in browser.requested() if not url.startswith((address, "data:"))]
    assert asked == []
    assert [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"] == []


def test_the_first_page_shows_the_picture(browser, address):
    browser.driver.get(f"{address}/index.html")
    assert "Capsule" in browser.driver.title
    picture = browser.driver.find_element(By.CSS_SELECTOR, "img[src$='capsule.svg']")
    WebDriverWait(browser.driver, SECONDS).until(lambda _: picture.get_property("complete"))
    assert picture.get_property("naturalWidth") > 0
    assert "another machine verifies it" in picture.get_attribute("alt")


@pytest.mark.parametrize("reader", ["authors", "reviewers", "administrators", "implementers"])
def test_every_reader_gets_to_a_tutorial(browser, address, reader):
    browser.driver.get(f"{address}/index.html")
    browser.driver.find_element(By.LINK_TEXT, "Tutorials").click()
    wait = WebDriverWait(browser.driver, SECONDS)
    link = wait.until(
        lambda driver: driver.find_element(By.PARTIAL_LINK_TEXT, f"Tutorial for {reader}")
    )
    link.click()
    wait.until(lambda driver: f"Tutorial for {reader}" in driver.title)
    heading = browser.driver.find_element(By.TAG_NAME, "h1").text
    assert heading.startswith(f"Tutorial for {reader}")


def test_the_search_finds_a_page(browser, address):
    browser.driver.get(f"{address}/index.html")
    wait = WebDriverWait(browser.driver, SECONDS)
    wait.until(
        lambda driver: driver.find_element(By.CSS_SELECTOR, ".md-search__button").is_displayed()
    )
    browser.driver.find_element(By.CSS_SELECTOR, ".md-search__button").click()
    wait.until(lambda _: browser.run(READY))
    ActionChains(browser.driver).send_keys("bubblewrap").perform()
    wait.until(lambda _: any("engines.html" in link for link in browser.run(FOUND)))


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html"></a><a href="#here"></a><p id="here">'
        '<a href="a.html#there"></a><a href="https://example.org/"></a>'
    )
    assert list(broken_links(tmp_path)) == [
        "a.html: b.html leads nowhere",
        "a.html: a.html#there leads nowhere",
    ]
