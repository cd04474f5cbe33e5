//! The page of `beeline doctor --html` in a real browser, where one is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{beeline, beeline_with, folder};

/// The browser, or a SKIP line.
fn chromium() -> Option<PathBuf> {
    let known = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    let found = known.iter().map(PathBuf::from).find(|path| path.exists());
    if found.is_none() {
        println!("SKIP chromium");
    }
    found
}

/// What a run of the browser on `page` printed: the document, and its log.
fn render(browser: &Path, profile: &Path, page: &Path, more: &[String]) -> (String, String) {
    let out = |name: &str| std::fs::File::create(profile.join(name)).unwrap();
    let mut child = Command::new(browser)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--hide-scrollbars", "--window-size=1280,2000", "--virtual-time-budget=2000"])
        .args(["--enable-logging=stderr", "--log-level=0"])
        .arg(format!("--user-data-dir={}", profile.join("profile").display()))
        .args(more)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(out("stdout"))
        .stderr(out("stderr"))
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(90);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            break child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let read = |name: &str| {
        String::from_utf8_lossy(&std::fs::read(profile.join(name)).unwrap()).into_owned()
    };
    let (document, log) = (read("stdout"), read("stderr"));
    assert!(status.success(), "{status}: {log}");
    (document, log)
}

/// A record with ports that redirect, a probe's transfers, and text that a page must not run.
fn pages(dir: &Path) -> Vec<(&'static str, PathBuf, &'static [&'static str])> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../beeline-core/tests/fixtures");
    let fixture = |name: &str| fixtures.join(name).display().to_string();
    let path = |name: &str| dir.join(name);
    let text = |path: &PathBuf| path.display().to_string();
    let (saved, page) = (path("machine.json"), path("saved.html"));
    let inputs = [fixture("lspci-vvv-4gpu-acs-on.txt"), fixture("topo-4gpu-pxb-pix.txt")];
    let mut args = vec!["doctor".to_owned()];
    args.extend(inputs);
    args.extend(["--save".to_owned(), text(&saved)]);
    beeline(&args);
    let load = ["doctor".to_owned(), "--load".into(), text(&saved), "--html".into(), text(&page)];
    beeline(&load);
    let probed = path("probed.html");
    let probe = ["doctor", "--probe", "--probe-bytes", "64K", "--html", &text(&probed)];
    let env = [("BEELINE_SIM_DEVICES", "2"), ("BEELINE_SIM_MEMORY", "64M")];
    beeline_with(&env, &probe);
    let saved: &[&str] = &["verdict", "sources", "machine", "matrix", "paths", "findings"];
    vec![("saved", page, saved), ("probed", probed, &["verdict", "transfers", "findings"])]
}

#[test]
fn a_browser_shows_every_part_and_reports_no_error() {
    let Some(browser) = chromium() else { return };
    let dir = folder();
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-page");
    std::fs::create_dir_all(&kept).unwrap();
    for (name, page, ids) in pages(dir.path()) {
        let (document, log) = render(&browser, dir.path(), &page, &["--dump-dom".to_owned()]);
        for id in ids {
            assert!(document.contains(&format!("id=\"{id}\"")), "{name} has no {id}");
        }
        // The browser logs errors of a page, refused loads among them, as CONSOLE lines.
        let errors: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(errors.is_empty(), "{name}: {errors:?}");
        for (scheme, number) in [("dark", 0), ("light", 1)] {
            let shot = kept.join(format!("{name}-{scheme}.png"));
            let _ = std::fs::remove_file(&shot);
            let flags = [
                format!("--screenshot={}", shot.display()),
                format!("--blink-settings=preferredColorScheme={number}"),
            ];
            render(&browser, dir.path(), &page, &flags);
            let bytes = std::fs::read(&shot).unwrap();
            assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000, "{}", shot.display());
        }
    }
}

#[test]
fn an_error_of_a_page_would_be_seen() {
    let Some(browser) = chromium() else { return };
    let dir = folder();
    let page = dir.path().join("broken.html");
    std::fs::write(&page, "<!doctype html><script>throw new Error('seen')</script>").unwrap();
    let (_, log) = render(&browser, dir.path(), &page, &["--dump-dom".to_owned()]);
    assert!(log.lines().any(|line| line.contains("CONSOLE") && line.contains("seen")), "{log}");
}
