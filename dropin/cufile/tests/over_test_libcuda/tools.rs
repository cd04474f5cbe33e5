//! The libraries and the C compiler that the tests need.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a C program may run.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(150);

/// The drop-in, a folder in which the test libcuda has the driver's name, and a folder for files.
pub struct Bench {
    pub cufile: PathBuf,
    folder: tempfile::TempDir,
}

impl Bench {
    /// Builds both libraries. Prints a SKIP where cargo or the C compiler is missing.
    pub fn built() -> Option<Self> {
        static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
        let libraries = match BUILT.get_or_init(build) {
            Ok(folder) => folder,
            Err(missing) => {
                println!("SKIP {missing}");
                return None;
            }
        };
        if Command::new("cc").arg("--version").output().is_err() {
            println!("SKIP cc");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let driver = libraries.join("libbeeline_test_libcuda.so");
        std::os::unix::fs::symlink(driver, folder.path().join("libcuda.so.1")).unwrap();
        std::fs::create_dir(folder.path().join("files")).unwrap();
        Some(Self { cufile: libraries.join("libbeeline_cufile.so"), folder })
    }

    /// The `beeline` command.
    pub fn command(&self) -> PathBuf {
        self.cufile.with_file_name("beeline")
    }

    /// The test driver.
    pub fn driver(&self) -> PathBuf {
        self.folder().join("libcuda.so.1")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Compiles `source` with `flags`; prints a SKIP where the compiler lacks what they ask for.
    pub fn compile(&self, source: &Path, flags: &[&str]) -> Option<PathBuf> {
        let program = self.folder().join(format!("program{}", flags.concat().replace('/', "_")));
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
        let mut compile = Command::new("cc");
        compile.args(["-std=gnu11", "-g", "-O1", "-Wall", "-Werror"]).args(flags);
        compile
            .arg("-I")
            .arg(include)
            .arg(source)
            .arg("-o")
            .arg(&program)
            .args(["-ldl", "-lpthread"]);
        let output = compile.output().unwrap();
        if output.status.success() {
            return Some(program);
        }
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!flags.is_empty() && text.contains("cannot find"), "{text}");
        println!("SKIP {}", flags.join(" "));
        None
    }

    /// Runs `program` with the test driver; kills it where it does not end.
    pub fn run(&self, program: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
        let out = std::fs::File::create(self.folder().join("out")).unwrap();
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("CUFILE_") || name.starts_with("BEELINE_") {
                command.env_remove(name);
            }
        }
        command.env("BEELINE_TEST_CUDA_REUSE", "1");
        command.env("LD_LIBRARY_PATH", self.folder()).envs(env.iter().copied());
        let mut child = command.spawn().unwrap();
        let end = Instant::now() + PROGRAM_TIMEOUT;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                println!("did not end within {PROGRAM_TIMEOUT:?}");
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let stdout = std::fs::read(self.folder().join("out")).unwrap();
        Output { status, stdout, stderr: Vec::new() }
    }
}

fn build() -> Result<PathBuf, String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--package", "beeline-test-libcuda"]);
    command.args(["--package", "beeline-cufile", "--package", "beeline-cli"]);
    command.arg("--manifest-path").arg(&manifest);
    let output =
        command.arg("--target-dir").arg(target).output().map_err(|_| "cargo".to_owned())?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(target.join("debug"))
}
