//! The test library: built, found, spoilt, and put in the way of a process.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use beeline::Error;

/// Names the case that a child process runs.
pub const CASE: &str = "BEELINE_TEST_CASE";
/// What a child prints last.
pub const DONE: &str = "case done";
/// How long a child may run; most take milliseconds.
const CHILD_TIMEOUT: Duration = Duration::from_secs(100);
/// Before an error that a child answers.
const ANSWER: &str = "answer:";

/// `libcuda.so.1` in a folder of its own.
pub struct Library {
    folder: tempfile::TempDir,
}

impl Library {
    /// Builds `beeline-test-libcuda` into the target folder that this program came from, or takes the
    /// library that `BEELINE_TEST_LIBCUDA` names. Prints a SKIP where neither is possible.
    pub fn built() -> Option<Self> {
        static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
        let built = match BUILT.get_or_init(build) {
            Ok(path) => path,
            Err(missing) => {
                println!("SKIP {missing}");
                return None;
            }
        };
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(built, folder.path().join("libcuda.so.1")).unwrap();
        Some(Self { folder })
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("libcuda.so.1")
    }

    pub fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Another library of these bytes.
    pub fn with_bytes(&self, folder: &str, bytes: &[u8]) -> PathBuf {
        let path = self.beside(folder).join("libcuda.so.1");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The library without the function `name`: its last letter is another wherever it stands, so that
    /// neither `dlsym` nor `cuGetProcAddress` finds it.
    pub fn renamed(&self, name: &str) -> PathBuf {
        let mut bytes = std::fs::read(self.path()).unwrap();
        let mut places = 0;
        for at in 0..bytes.len().saturating_sub(name.len()) {
            if bytes[at..].starts_with(name.as_bytes()) {
                bytes[at + name.len() - 1] = b'_';
                places += 1;
            }
        }
        assert!(places > 0, "the library has {name}");
        self.with_bytes("renamed", &bytes)
    }
}

fn build() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("BEELINE_TEST_LIBCUDA") {
        return Ok(path.into());
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--package", "beeline-test-libcuda", "--manifest-path"]);
    command.arg(&manifest).arg("--target-dir").arg(target);
    let output = command.output().map_err(|_| "cargo, or BEELINE_TEST_LIBCUDA".to_owned())?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(target.join("debug/libbeeline_test_libcuda.so"))
}

/// Runs a case of this program with `library` found as the system's driver, and `env`.
pub fn child(case: &str, library: &Library, env: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["in_a_process_of_its_own", "--exact", "--ignored", "--nocapture"]);
    for variable in ["BEELINE_CUDA_LIBRARY", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    command.env("LD_LIBRARY_PATH", library.folder.path()).env(CASE, case);
    command.envs(env.iter().copied());
    Child { what: format!("{case} with {env:?}"), output: bounded(&mut command, case) }
}

/// Runs `command` to its end, or kills it where that does not come: a hang is a failure, too.
fn bounded(command: &mut Command, case: &str) -> Output {
    let (mut out, mut err) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    command.stdin(Stdio::null());
    command.stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
    let mut child = command.spawn().unwrap();
    let end = Instant::now() + CHILD_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            println!("{case} did not end within {CHILD_TIMEOUT:?}");
            child.kill().unwrap();
            break child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let read = |file: &mut File| {
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    };
    Output { status, stdout: read(&mut out), stderr: read(&mut err) }
}

pub struct Child {
    what: String,
    output: Output,
}

impl Child {
    pub fn passed(&self) {
        let text = String::from_utf8_lossy(&self.output.stdout);
        let done = self.output.status.success() && text.lines().any(|line| line == DONE);
        let errors = String::from_utf8_lossy(&self.output.stderr);
        assert!(done, "{}: {}\n{text}\n{errors}", self.what, self.output.status);
    }

    /// The error that the case answered.
    pub fn answer(&self) -> Answer {
        self.passed();
        let text = String::from_utf8_lossy(&self.output.stdout);
        let line = text.lines().find_map(|line| line.strip_prefix(ANSWER));
        let mut fields = line.unwrap_or_else(|| panic!("{}: no answer", self.what)).splitn(3, '\t');
        let mut field = || fields.next().unwrap().to_owned();
        Answer { code: field(), kind: field(), text: field() }
    }
}

/// An error as it crosses from a child.
pub struct Answer {
    pub code: String,
    pub kind: String,
    pub text: String,
}

impl Answer {
    pub fn expect(&self, expected: &Self, what: &str) {
        assert_eq!(
            (&self.code, &self.kind),
            (&expected.code, &expected.kind),
            "{what}: {}",
            self.text
        );
        assert!(self.text.contains(&expected.text), "{what}: {}", self.text);
    }
}

/// Answers an error to the parent.
pub fn answer(error: &Error) {
    let kind = match error {
        _ if error.is_out_of_memory() => "out-of-memory",
        _ if error.is_not_found() => "not-found",
        _ if error.is_device() => "device",
        _ if error.is_refused() => "refused",
        _ => "another",
    };
    println!("{ANSWER}{}\t{kind}\t{error}", error.code());
}
