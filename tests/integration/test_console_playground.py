"""The console's page for trying models: conversations, figures, code, and answers that are hostile."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes import FakeWorker
from tests.integration.browser import Browser
from tests.integration.console_site import PIECES, Site, Workers, gateway, is_clean, log_in

HOSTILE = """# Title <img src=x onerror="window.hacked=1">

<script>window.hacked = 1</script> and **bold**, *italic*, `a < b`, 2 * 3 * 4

[x](javascript:window.hacked=1) ![y](https://outside.example/y.png) <https://outside.example>

- one
- two
1. first

```html
<img src=x onerror="window.hacked=1"> **not bold**
~~~
"""
"""Its last fence is not closed."""
QUOTES = 'it\'s "quoted" $HOME `id` \\ ${1} %s\n\u2028 é 😀 </script>'


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """The third has no draft and is slower."""
    with Workers(FakeWorker(pieces=PIECES, pause_seconds=0.2)) as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> Iterator[Site]:
    with gateway(tmp_path_factory.mktemp("playground"), workers) as made:
        yield made


@pytest.fixture
def page(window: Browser, site: Site, workers: Workers) -> Browser:
    """The page, with a tenant's key; it notes the bodies that it sends."""
    workers.good.pieces = workers.useless.pieces = PIECES
    window.forget()
    window.resize(1200, 900)
    log_in(window, site)
    window.open(site.page("/chat"))
    window.find("#tenant-key").send_keys(site.key)
    window.driver.execute_script(
        "window.sent = []; const fetch = window.fetch;"
        "window.fetch = (url, options) => { window.sent.push(options.body); return fetch(url, options); }"
    )
    return window


def fill(page: Browser, name: str, value: str) -> None:
    """Enter text that a keyboard may not have."""
    page.driver.execute_script(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )


def send(page: Browser, words: str) -> None:
    fill(page, "prompt", words)
    page.find("#chat button[type=submit]").click()


def sent(page: Browser) -> list[dict]:
    return [json.loads(body) for body in page.driver.execute_script("return window.sent")]


def code(page: Browser, language: str) -> str:
    fill(page, "language", language)
    return page.driver.execute_script("return document.getElementById('code').textContent")


def test_a_conversation_repeats_its_turns_until_a_new_one(page, site):
    """With the system prompt and the parameters that are set, and no others."""
    page.find("#parameters summary").click()
    fill(page, "system", "Be brief.")
    fill(page, "temperature", "0.5")
    fill(page, "seed", "7")
    send(page, "First")
    page.wait_for("Done", "#chat-status")
    send(page, "Second")
    page.wait_until(lambda: len(page.texts(".figures")) == 2)
    first, second = sent(page)
    answer = {"role": "assistant", "content": "".join(PIECES)}
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "First"}]
    assert second["messages"] == [*first["messages"], answer, {"role": "user", "content": "Second"}]
    assert {name: second[name] for name in ("temperature", "seed")} == {"temperature": 0.5, "seed": 7}
    assert not {"max_tokens", "top_p"} & set(second)
    page.find("#new").click()
    assert page.text("#conversation") == ""
    send(page, "Third")
    page.wait_for("Done", "#chat-status")
    assert sent(page)[2]["messages"] == [system, {"role": "user", "content": "Third"}]
    is_clean(page, site)


def test_an_answer_has_its_figures(page):
    """Of the client's clock and the worker's report; the comparison is measured when requested."""
    send(page, "Say thirty words.")
    page.wait_for("Done", "#chat-status")
    shown = page.text(".figures")
    assert re.search(r"Time to first token\s+\d+\.\d\d s", shown)
    assert re.search(r"Tokens per second\s+\d+\.\d", shown)
    assert re.search(r"Acceptance length\s+2\.50", shown)
    assert re.search(r"Request \S{8,}", page.text("#conversation"))
    page.find(".figures button").click()
    page.wait_for("against", ".figures")
    speedup, with_drafts, without = re.search(
        r"([\d.]+)\N{MULTIPLICATION SIGN} \(([\d.]+) against ([\d.]+) tokens/s\)", page.text(".figures")
    ).groups()
    assert float(with_drafts) > float(without)
    assert float(speedup) > 1
    assert sent(page)[0] == sent(page)[1]


def test_a_stopped_answer_is_kept(page, workers):
    """It is part of the next request."""
    workers.good.pieces = workers.useless.pieces = PIECES * 200  # goes on until it is stopped
    send(page, "Say many words.")
    page.wait_for("word3", ".answer")
    page.find("#stop").click()
    page.wait_for("Stopped.", "#chat-status")
    kept = page.text(".answer")
    assert kept.startswith("word0 word1")
    workers.good.pieces = workers.useless.pieces = PIECES
    send(page, "Go on.")
    page.wait_for("Done", "#chat-status")
    assert sent(page)[1]["messages"][1]["content"].split() == kept.split()


def test_an_error_of_the_gateway_is_shown(page):
    """The message can be sent again, and is not part of the conversation."""
    fill(page, "max_tokens", "999999999999")
    fill(page, "tenant-key", "sk-wrong")
    send(page, "Hello")
    assert "key" in page.wait_for("Failed", "#chat-status")
    assert page.find("#prompt").get_attribute("value") == "Hello"
    assert [message["role"] for message in sent(page)[0]["messages"]] == ["user"]


def test_parameters_out_of_range_are_not_sent_silently(page):
    """The closed section opens, so that the browser can say which field is wrong."""
    fill(page, "top_p", "3")
    send(page, "Hello")
    page.find("#parameters[open]")
    assert sent(page) == []


def test_hostile_markdown_is_only_text(page, site, workers):
    """No element of the model's making, no address, no script; fences that stay open end with the answer."""
    workers.good.pieces = workers.useless.pieces = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    send(page, "Attack")
    page.wait_for("Done", "#chat-status")
    assert page.driver.execute_script("return window.hacked") is None
    elements = "return [...document.querySelectorAll('.answer *')].map((one) => one.localName)"
    assert set(page.driver.execute_script(elements)) == {
        *("h4", "p", "strong", "em", "code", "ul", "ol", "li", "pre")
    }
    attributes = (
        "return [...document.querySelectorAll('.answer *')].flatMap((one) => one.getAttributeNames())"
    )
    assert set(page.driver.execute_script(attributes)) == {"tabindex", "start"}
    assert "x (javascript:window.hacked=1)" in page.text(".answer")
    assert page.texts(".answer li") == ["one", "two", "first"]
    assert page.texts(".answer strong") == ["bold"]
    assert page.texts(".answer em") == ["italic"]
    assert page.text(".answer pre") == '<img src=x onerror="window.hacked=1"> **not bold**\n~~~\n'
    page.find("#plain").click()
    assert page.driver.execute_script("return document.querySelector('.answer').textContent") == HOSTILE
    is_clean(page, site)


def test_markdown_takes_no_time_for_long_lines(page):
    """Eight times the line takes far less than the 64 times of one that backtracks; the best of five."""
    script = """
    const done = arguments[1];
    import("/console/static/markdown.js").then(({ render }) => {
      const times = [20000, 160000].map((length) => {
        const text = arguments[0].repeat(length / arguments[0].length);
        const runs = Array.from({ length: 5 }, () => {
          const began = performance.now();
          render(text);
          return performance.now() - began;
        });
        return Math.min(...runs);
      });
      done(times);
    });
    """
    for piece in ("*", "[", "`", "**a", "![a](", "a "):
        short, long = page.driver.execute_async_script(script, piece)
        assert long < 32 * max(short, 1), piece


def test_code_sends_what_the_page_sends(page, site):
    """curl and Python run against the public API; no code has the key."""
    fill(page, "system", QUOTES)
    fill(page, "temperature", "0.25")
    fill(page, "prompt", QUOTES)
    fill(page, "base-url", f"{site.process.url}/v1/")
    curl, python, javascript = (code(page, name) for name in ("curl", "python", "javascript"))
    page.find("#chat button[type=submit]").click()
    page.wait_for("Done", "#chat-status")
    (body,) = sent(page)
    assert body["messages"][-1]["content"] == QUOTES
    assert code(page, "curl") == curl  # of the last request, while no message is written
    assert all(site.key not in each and "APPLIANCE_KEY" in each for each in (curl, python, javascript))
    words = shlex.split(curl.replace("\\\n", ""))
    assert words[:3] == ["curl", "--no-buffer", f"{site.process.url}/v1/chat/completions"]
    assert json.loads(words[words.index("--data") + 1]) == body
    environment = {**os.environ, "APPLIANCE_KEY": site.key, "NO_PROXY": "*"}
    for command in (["bash", "-c", curl], [sys.executable, "-c", python]):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "word29" in done.stdout
    compile(python, "python", "exec")
    requested = page.driver.execute_async_script(
        "const done = arguments[0]; (async () => {"
        "const process = {env: {APPLIANCE_KEY: 'k'}, stdout: {write() {}}};"
        "const fetch = async (url, options) => { done([url, options]); return new Response('x'); };"
        f"{javascript}}})()"
    )
    assert requested[0] == f"{site.process.url}/v1/chat/completions"
    assert requested[1]["headers"]["Authorization"] == "Bearer k"
    assert json.loads(requested[1]["body"]) == body


def test_the_base_url_is_that_of_the_api_listener(page):
    """Not the admin listener's, which serves this page; a port that is not fixed is left to the operator."""
    script = """
    const done = arguments[2];
    import("/console/static/snippets.js").then(({ baseUrl }) =>
      done(baseUrl(arguments[0], arguments[1], { protocol: "https:", hostname: "gateway" })));
    """
    expected = {
        ("127.0.0.1", "8080"): "https://127.0.0.1:8080/v1",
        ("0.0.0.0", "8080"): "https://gateway:8080/v1",
        ("::", "443"): "https://gateway:443/v1",
        ("fd00::1", "8080"): "https://[fd00::1]:8080/v1",
        ("127.0.0.1", "0"): "",
    }
    for given, url in expected.items():
        assert page.driver.execute_async_script(script, *given) == url
    assert "https://gateway.example/v1/chat/completions" in code(page, "curl")


def test_a_conversation_with_code_fits_a_phone(page, workers):
    page.resize(375, 812)
    workers.good.pieces = workers.useless.pieces = ["```\n", "x" * 300, "\n```\n", "y" * 300]
    fill(page, "prompt", "z" * 300)
    for summary in page.driver.find_elements("css selector", "summary"):
        summary.click()
    page.find("#chat button[type=submit]").click()
    page.wait_for("Done", "#chat-status")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 375
    page.keep_picture("console-chat-phone")
