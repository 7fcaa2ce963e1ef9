"""``python docs/images/page.py http://127.0.0.1:8000``: take the pictures of the page of the demo.

page-light.png and page-dark.png are the whole page, and page-figures.png is the part that can still
be read in the width of the README.  The server runs, and `chromium` is on the PATH.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent
SCREEN = {"width": 1440, "height": 900}
TOKEN = 10  # '):', at which the lens changes with the depth


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for theme in ("light", "dark"):
            # More pixels than its size needs, for screens that have them.
            page = browser.new_page(viewport=SCREEN, color_scheme=theme, device_scale_factor=1.5)
            open_page(page, url)
            page.screenshot(path=FOLDER / f"page-{theme}.png")
            if theme == "light":
                page.screenshot(path=FOLDER / "page-figures.png", clip=figures(page))
        browser.close()


def open_page(page: Page, url: str) -> None:
    """The example with its chosen token."""
    page.goto(f"{url}/attn_res")
    page.locator("#status").get_by_text("tokens traced").wait_for()
    page.locator("#tokens [role=option]").nth(TOKEN).click()
    page.evaluate("document.activeElement.blur()")


def figures(page: Page) -> dict[str, float]:
    """The place of the figures down to the map over the tokens."""
    first, last = (page.locator(f"#{name}").bounding_box() for name in ("right", "over-tokens"))
    assert first and last
    return first | {"height": last["y"] + last["height"] - first["y"]}


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
