//! Children, files on a drive, and reads along every route.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beeline::gpu::Gpu;
use beeline::storage::{Engine, File, Report, StorageRoute};
use tempfile::TempDir;

use crate::support::{
    assert_nothing_left, contents, engine, make_cold, open, pattern, sim, whole, write,
};

/// Names the child to be.
pub(crate) const CHILD: &str = "BEELINE_CHILD";
/// The file that the parent made for its child.
const FILE: &str = "BEELINE_CHILD_FILE";
/// What a child prints when it has come to its end.
pub(crate) const DONE: &str = "child is done: ";

/// Three chunks and a bit: more than one request in flight, and an end off every block.
pub(crate) const SIZE: usize = (12 << 20) + 1234;

/// The routes that a file can be read by on a simulated device.
pub(crate) const ROUTES: [StorageRoute; 4] = [
    StorageRoute::MappedPageCache,
    StorageRoute::PageCache,
    StorageRoute::Direct,
    StorageRoute::ThreadPool,
];

/// Whether this process may do what only root may.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs this binary again as `child`, behind `wrapper` (a command and its arguments). Prints the SKIP
/// lines of the child, and `SKIP <wrapper>` where the wrapper itself cannot run.
pub(crate) fn run_child(wrapper: &[&str], child: &str, file: Option<&Path>) {
    let exe = ExecutableForAll::new();
    let mut line: Vec<&OsStr> = wrapper.iter().map(OsStr::new).collect();
    line.push(exe.path.as_os_str());
    if let Some((name, rest)) = wrapper.split_first() {
        // The same wrapper around a command that cannot fail.
        let probe = Command::new(name).args(rest).arg("/bin/true").output();
        if !probe.is_ok_and(|output| output.status.success()) {
            return println!("SKIP {child} ({name} is missing or refused)");
        }
    }
    let (program, arguments) = line.split_first().unwrap();
    let mut command = Command::new(program);
    command.args(arguments).args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, child).env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    if let Some(file) = file {
        command.env(FILE, file);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let done = text.contains(&format!("{DONE}{child}"));
    assert!(output.status.success() && done, "child {child}: {}\n{text}\n{errors}", output.status);
    // The harness prints a line without an end before the child's first.
    text.lines().filter_map(|line| line.find("SKIP ").map(|at| &line[at..])).for_each(|skip| {
        println!("{skip}");
    });
}

/// As [`run_child`], as another user than root: one that owns nothing here.
pub(crate) fn run_as_nobody(child: &str, file: Option<&Path>) {
    if !is_root() {
        return run_child(&[], child, file);
    }
    // Not the usual `nobody`, whose processes on this machine would count against limits.
    let id = "61234";
    run_child(&["setpriv", "--reuid", id, "--regid", id, "--clear-groups"], child, file);
}

/// As [`run_child`], with mounts of its own, which vanish with it.
pub(crate) fn run_with_own_mounts(child: &str) {
    run_child(&["unshare", "--mount"], child, None);
}

/// This binary at a place where every user may run it.
struct ExecutableForAll {
    path: PathBuf,
    _folder: TempDir,
}

impl ExecutableForAll {
    fn new() -> Self {
        let folder = folder_for_all();
        let path = folder.path().join("environments");
        let own = std::env::current_exe().unwrap();
        if std::fs::hard_link(&own, &path).is_err() {
            std::fs::copy(&own, &path).unwrap();
        }
        Self { path, _folder: folder }
    }
}

/// A folder that everybody may enter, on a drive where the machine has its temporary files on one.
pub(crate) fn folder_for_all() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    folder
}

/// A file of [`SIZE`] bytes in `folder`, cold, that everybody may read.
pub(crate) fn file_in(folder: &Path) -> PathBuf {
    let path = write(folder, "file", &bytes());
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o444)).unwrap();
    make_cold(&path);
    path
}

/// What [`file_in`] writes.
pub(crate) fn bytes() -> Vec<u8> {
    pattern(42, SIZE)
}

/// In a child: the file that the parent made.
pub(crate) fn parents_file() -> PathBuf {
    std::env::var_os(FILE).expect("the parent names a file").into()
}

/// Reads `file` whole into a new buffer and compares every byte with [`bytes`].
pub(crate) fn read(
    gpu: &Gpu,
    engine: &Engine,
    path: &Path,
    route: Option<StorageRoute>,
) -> beeline::Result<Report> {
    let file = open(path);
    let buffer = gpu.alloc(file.size()).unwrap();
    let mut request = whole(&file, &buffer);
    request.route = route;
    let report = engine.run(request)?;
    assert!(contents(gpu, &buffer) == bytes(), "{route:?} brought other bytes");
    assert!(report.routes.iter().all(|part| route.is_none_or(|named| part.route == named)));
    Ok(report)
}

/// Reads the file along every route, cold each time, and answers those that were open. What is not
/// open must be refused with a reason.
pub(crate) fn open_routes(path: &Path) -> Vec<StorageRoute> {
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    let mut open = Vec::new();
    for route in ROUTES {
        make_cold(path);
        match read(&gpu, &engine, path, Some(route)) {
            Ok(_) => open.push(route),
            Err(error) => {
                assert!(error.is_no_route() && !error.reasons().is_empty(), "{error:?}");
            }
        }
    }
    drop(engine);
    assert_nothing_left(&gpu);
    open
}

/// The routes and causes of a load on the default mode: once cold, once with every page resident.
pub(crate) fn cold_and_warm(path: &Path) -> (Vec<String>, Vec<String>) {
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    make_cold(path);
    let cold = read(&gpu, &engine, path, None).unwrap();
    assert_eq!(std::fs::read(path).unwrap().len(), SIZE);
    let warm = read(&gpu, &engine, path, None).unwrap();
    let names = |report: &Report| {
        report.routes.iter().map(|part| format!("{} {}", part.route, part.why)).collect()
    };
    (names(&cold), names(&warm))
}

/// The facts of the file, as a message for asserts.
pub(crate) fn facts(path: &Path) -> String {
    format!("{:?}", File::open(path).unwrap())
}

/// Runs a command; its output where it succeeded.
pub(crate) fn run(program: &str, arguments: &[&OsStr]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

/// [`run`] of `mount`, in a child with mounts of its own.
pub(crate) fn mount(arguments: &[&OsStr]) -> bool {
    run("mount", arguments).is_some()
}
