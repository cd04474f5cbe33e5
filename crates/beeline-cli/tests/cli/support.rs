//! Runs of the command, and models to run it on.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use beeline::core::model::{Dtype, write::HeaderBuilder};
use serde_json::Value;

/// What a run of the command left.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let run = Self {
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        };
        assert!(!run.stderr.contains("panicked"), "{run:?}");
        run
    }
}

impl Run {
    /// The one JSON object on stdout.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        let value: Value =
            serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("{self:?}"));
        assert!(value.is_object(), "{self:?}");
        value
    }

    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}

/// The command with no settings from the environment of the test.
pub(crate) fn command() -> Command {
    without_settings(Command::new(env!("CARGO_BIN_EXE_beeline")))
}

/// Option of `env`: a test that runs in the background may have signals ignored.
pub(crate) const SIGNALS_AS_USUAL: &str = "--default-signal=HUP,INT,TERM";

/// The same, started by `program` with `args` of its own.
pub(crate) fn command_by(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).arg(env!("CARGO_BIN_EXE_beeline"));
    without_settings(command)
}

fn without_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BEELINE_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Runs the command with `args`.
pub(crate) fn beeline<S: AsRef<OsStr>>(args: &[S]) -> Run {
    beeline_with(&[], args)
}

/// Runs the command with `args` and these variables set.
pub(crate) fn beeline_with<S: AsRef<OsStr>>(env: &[(&str, &str)], args: &[S]) -> Run {
    command().args(args).envs(env.iter().copied()).output().unwrap().into()
}

/// A folder on the drive that builds go to.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes that differ at every position, so that a shift or a hole shows.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// A safetensors file of these F32 tensors.
pub(crate) fn model_bytes(tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let mut builder = HeaderBuilder::new();
    let mut len = 0;
    for (name, shape) in tensors {
        builder = builder.tensor(name, Dtype::F32, shape).unwrap();
        len += shape.iter().product::<u64>() * 4;
    }
    let mut bytes = builder.build().unwrap();
    bytes.extend(pattern(len, usize::try_from(len).unwrap()));
    bytes
}

/// Writes a model of three tensors, of 10 rows each and 1240 bytes together.
pub(crate) fn model(folder: &Path, name: impl AsRef<Path>) -> PathBuf {
    let path = folder.join(name);
    let tensors: [(&str, &[u64]); 3] =
        [("embed", &[10, 20]), ("head", &[10, 1]), ("norm", &[10, 10])];
    std::fs::write(&path, model_bytes(&tensors)).unwrap();
    path
}

/// Writes a model in two shards with an index that names them.
pub(crate) fn sharded(folder: &Path) -> PathBuf {
    let one = model_bytes(&[("a", &[100, 7])]);
    let two = model_bytes(&[("b", &[64]), ("c", &[3])]);
    std::fs::write(folder.join("model-00001-of-00002.safetensors"), one).unwrap();
    std::fs::write(folder.join("model-00002-of-00002.safetensors"), two).unwrap();
    let index = serde_json::json!({
        "metadata": { "total_size": 2800 + 256 + 12 },
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    });
    let path = folder.join("model.safetensors.index.json");
    std::fs::write(&path, index.to_string()).unwrap();
    path
}

/// A file of `len` bytes that is a hole but for a few bytes at its start, middle and end.
pub(crate) fn sparse(path: &Path, len: u64) {
    use std::os::unix::fs::FileExt as _;

    let file = std::fs::File::create(path).unwrap();
    file.set_len(len).unwrap();
    for at in [0, len / 2 + 1, len.saturating_sub(5000)] {
        let len = usize::try_from((len - at).min(5000)).unwrap();
        file.write_all_at(&pattern(at, len), at).unwrap();
    }
}

/// Whether two files hold the same bytes.
pub(crate) fn same(one: &Path, other: &Path) -> bool {
    Command::new("cmp").arg("-s").arg(one).arg(other).status().unwrap().success()
}

/// The names in a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().to_string_lossy().into_owned()
    };
    let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(name).collect();
    names.sort_unstable();
    names
}

/// The keys of a JSON object, sorted.
pub(crate) fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Whether this machine shows an NVIDIA GPU, so that the default device is not simulated.
pub(crate) fn has_gpu() -> bool {
    ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"].iter().any(|node| Path::new(node).exists())
}
