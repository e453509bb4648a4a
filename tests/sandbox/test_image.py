"""Which apt sources the base image is built from."""

from legorl.sandbox.image import distribution_sources

DEB822 = """# comment
Types: deb
URIs: http://deb.example.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /k/debian.gpg

Types: deb deb-src
URIs: http://deb.example.org/debian-security
Suites: bookworm-security
Components: main
"""
FOREIGN = """deb [arch=amd64] https://packages.example.com cloud-sdk-bookworm main
deb https://download.example.com/linux/debian bookworm stable
deb https://example.com/debian trixie main
deb-src http://deb.example.org/debian bookworm main
"""


def test_only_the_distribution_is_taken():
    assert distribution_sources("bookworm", [(".sources", DEB822), (".list", FOREIGN)]) == [
        "deb [signed-by=/k/debian.gpg] http://deb.example.org/debian bookworm main",
        "deb [signed-by=/k/debian.gpg] http://deb.example.org/debian bookworm-updates main",
        "deb http://deb.example.org/debian-security bookworm-security main",
    ]


def test_one_line_sources_and_disabled_ones():
    text = "deb [signed-by=/k.gpg] http://archive.example.org/ubuntu/ noble main universe\n"
    assert distribution_sources("noble", [(".list", text)]) == [
        "deb [signed-by=/k.gpg] http://archive.example.org/ubuntu/ noble main universe"
    ]
    off = "Types: deb\nURIs: http://a/debian\nSuites: bookworm\nComponents: main\nEnabled: no\n"
    assert distribution_sources("bookworm", [(".sources", off)]) == []
