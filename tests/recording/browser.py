"""Show a page in a browser (QtWebEngine, which is Chromium), and tell what it shows: run as a program.

    python browser.py PAGE PICTURE WIDTH

Prints a line of JSON: the number of charts, some texts, what scripts have complained of, and what the page
asked for besides itself. The picture is of the whole page.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu"

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

_LOOK_MS, _FRAMES = 100, 5
_DRAWN = """
(() => {
  const roots = window.Bokeh === undefined ? [] : Bokeh.documents.flatMap(each => each.roots());
  const idle = roots.length > 0 && Bokeh.documents.every(each => each.is_idle);
  const whole = window.innerHeight >= document.documentElement.scrollHeight;
  if (idle && whole && window.frames_drawn === undefined) {
    window.frames_drawn = 0;
    const count = () => { window.frames_drawn += 1; requestAnimationFrame(count); };
    requestAnimationFrame(count);
  }
  return {idle, frames: window.frames_drawn || 0, charts: roots.length,
          height: document.documentElement.scrollHeight,
          page_title: document.title,
          items: [...document.querySelectorAll('li')].map(each => each.textContent),
          titles: [...document.querySelectorAll('h2')].map(each => each.textContent)};
})()
"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Notes what a page asks for, and lets it have only files and what it contains."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []

    def interceptRequest(self, info) -> None:
        if info.requestUrl().scheme() not in ("file", "data", "blob"):
            self.others.append(info.requestUrl().toString())
            info.block(True)


class Page(QWebEnginePage):
    complaints: list[str] = []  # noqa: RUF012 - there is one page

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
            self.complaints.append(message)


def main(path: str, picture: str, width: int) -> None:
    application = QApplication(sys.argv[:1])
    profile, requests, view = QWebEngineProfile(), Requests(), QWebEngineView()
    profile.setUrlRequestInterceptor(requests)
    page = Page(profile, view)
    view.setPage(page)
    view.resize(width, 800)
    view.show()

    grabbed = [None]

    def look() -> None:
        page.runJavaScript(_DRAWN, seen)

    def seen(found) -> None:
        if found["idle"] and view.height() < found["height"]:
            view.resize(width, int(found["height"]))
        # What a frame draws is on the screen after the next, and the window has a new size only then.
        if found["frames"] < _FRAMES or (drawn := view.grab().toImage()) != grabbed[0]:
            if found["frames"] >= _FRAMES:
                grabbed[0] = drawn
            QTimer.singleShot(_LOOK_MS, look)
            return
        drawn.save(picture)
        print(json.dumps({**found, "complaints": page.complaints, "requests": requests.others}), flush=True)
        os._exit(0)  # Qt warns of pages that outlive their profile

    view.loadFinished.connect(lambda _: look())
    view.load(QUrl.fromLocalFile(path))
    application.exec()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
