"""Reading the HTML that the templates of the page give."""

from html.parser import HTMLParser

from capsule.report.templates import TEMPLATES


class Reader(HTMLParser):
    """Collects the elements and texts that an HTML parser finds."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def drawn(macro, *arguments):
    """Return the output of a macro of the page for some arguments."""
    source = f'{{% from "parts.html.jinja" import {macro} %}}{{{{ {macro}(*arguments) }}}}'
    return TEMPLATES.from_string(source).render(arguments=arguments)
