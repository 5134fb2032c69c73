//! Chromium without a screen: shows a page at a width, in light or in dark. The tests of other pages
//! use this file as well.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const HEIGHT: u32 = 4200;
/// Chromium makes no smaller windows, so the page is shown in a frame of its width.
const WINDOW_WIDTH_MIN: u32 = 500;

/// How a page is shown.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub width: u32,
    pub is_dark: bool,
}

/// A page in a directory.
pub struct Browser<'a> {
    dir: &'a Path,
    page: &'a str,
    probe: &'a str,
}

impl<'a> Browser<'a> {
    /// Shows a page. The script `probe` measures it, and appends its results to the document around it.
    pub fn new(dir: &'a Path, page: &'a str, probe: &'a str) -> Self {
        Self { dir, page, probe }
    }

    /// The measurements of the probe.
    pub fn measure(&self, view: View) -> Value {
        let page = self.page.replace("</body>", &format!("<script>{}</script></body>", self.probe));
        let file = self.write_framed(&page, view);
        let output = self.command(view).arg("--dump-dom").arg(file).output().unwrap();
        let dom = String::from_utf8(output.stdout).unwrap();
        let found = dom.split_once("<pre id=\"found\"").and_then(|(_, rest)| rest.split_once('>'));
        let found = found.and_then(|(_, rest)| rest.split_once("</pre>"));
        let (found, _) =
            found.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        let entities = [("&nbsp;", "\u{a0}"), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")];
        let text = entities.iter().fold(found.to_owned(), |text, it| text.replace(it.0, it.1));
        serde_json::from_str(&text).unwrap()
    }

    /// Writes a picture of the page into a directory, for people.
    pub fn take_screenshot(&self, view: View, directory: &Path) {
        let scheme = if view.is_dark { "dark" } else { "light" };
        let picture = directory.join(format!("{}-{scheme}.png", view.width));
        let file = self.write_framed(self.page, view);
        let picture = format!("--screenshot={}", picture.display());
        let output =
            self.command(view).args([&picture, "--hide-scrollbars"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn write_framed(&self, page: &str, view: View) -> PathBuf {
        let page = page.replace('&', "&amp;").replace('"', "&quot;");
        let framed = format!(
            "<!doctype html><meta name=color-scheme content='light dark'><body style='margin:0'>\
             <iframe style='width:{}px;height:{HEIGHT}px;border:0' srcdoc=\"{page}\"></iframe>",
            view.width
        );
        let file = self.dir.join("framed.html");
        std::fs::write(&file, framed).unwrap();
        file
    }

    fn command(&self, view: View) -> Command {
        let program = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        // 0 is dark, 1 is light (Blink's `mojom::PreferredColorScheme`).
        let scheme = u8::from(!view.is_dark);
        let mut command = Command::new(program);
        command
            .args(["--headless", "--no-sandbox", "--disable-gpu"])
            // A script may wait for something before it measures.
            .arg("--virtual-time-budget=10000")
            .arg(format!("--window-size={},{HEIGHT}", view.width.max(WINDOW_WIDTH_MIN)))
            .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
            .arg(format!("--user-data-dir={}", self.dir.join("profile").display()));
        command
    }
}
