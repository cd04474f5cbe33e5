//! Gives the library the name that programs load the CUDA driver by, and builds the kernels of collectives for the CPU
//! (`kernels/emulate`), where there is a C++ compiler: then `cfg(emulated)` is set.

#![allow(clippy::print_stdout, clippy::panic, reason = "how a build script speaks to cargo")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::{env, fs};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-check-cfg=cfg(emulated)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CXX");
    let kernels = folder("CARGO_MANIFEST_DIR").join("../../kernels");
    let kernels = fs::canonicalize(&kernels).unwrap_or(kernels);
    for part in ["beeline", "emulate", "ptx", "move.cu", "peer.cu", "reduce.cu", "stage.cu"] {
        println!("cargo::rerun-if-changed={}", kernels.join(part).display());
    }
    let out = folder("OUT_DIR");
    let modules = modules(&kernels);
    write(&out.join("modules.rs"), &texts(&kernels, &modules));
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let native = env::var("HOST") == env::var("TARGET");
    if !native || Command::new(&compiler).arg("--version").output().is_err() {
        println!("cargo::warning=no C++ compiler for this target: no kernels of collectives");
        return;
    }
    compile(&kernels, &out, &modules, Path::new(&compiler));
    println!("cargo::rustc-cfg=emulated");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=beeline_emulated");
    println!("cargo::rustc-link-lib=dylib=stdc++");
}

/// A module of `kernels/ptx`: its name, the source it comes from, and its type and operator.
struct Module {
    name: String,
    source: PathBuf,
    of: Option<(String, String)>,
}

impl Module {
    /// Modules of one unit are compiled together.
    fn unit(&self) -> &str {
        self.of.as_ref().map_or(self.name.as_str(), |(kind, _)| kind)
    }
}

fn modules(kernels: &Path) -> Vec<Module> {
    let folder = kernels.join("ptx");
    let listed = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<String> = listed
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".ptx").map(str::to_owned))
        .collect();
    names.sort_unstable();
    let module = |name: String| {
        let own = kernels.join(format!("{name}.cu"));
        if own.exists() {
            return Some(Module { name, source: own, of: None });
        }
        let (kind, operator) = name.split_once('-')?;
        let of = Some((kind.to_uppercase(), operator.to_uppercase()));
        Some(Module { source: kernels.join("reduce.cu"), of, name })
    };
    names.into_iter().filter_map(module).collect()
}

/// Names and texts of all modules, by which the library knows them again.
fn texts(kernels: &Path, modules: &[Module]) -> String {
    let mut text =
        "/// The committed modules: name and PTX.\nstatic MODULES: &[(&str, &str)] = &[\n"
            .to_owned();
    for Module { name, .. } in modules {
        let path = kernels.join("ptx").join(format!("{name}.ptx"));
        let _ = writeln!(text, "    ({name:?}, include_str!({path:?})),");
    }
    text.push_str("];\n");
    text
}

/// One source a unit, compiled and archived.
fn compile(kernels: &Path, out: &Path, modules: &[Module], compiler: &Path) {
    let mut units: BTreeMap<&str, Vec<&Module>> = BTreeMap::new();
    for module in modules {
        units.entry(module.unit()).or_default().push(module);
    }
    let mut sources: Vec<(String, String)> = units
        .iter()
        .map(|(unit, modules)| ((*unit).to_owned(), source(kernels, unit, modules)))
        .collect();
    sources.push(("all".to_owned(), all(kernels, units.keys().copied())));
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(2);
    let (mut running, mut objects): (Vec<Child>, Vec<PathBuf>) = (Vec::new(), Vec::new());
    for (unit, text) in &sources {
        let (place, object) = (out.join(format!("{unit}.cpp")), out.join(format!("{unit}.o")));
        write(&place, text);
        if running.len() >= jobs {
            finish(running.remove(0));
        }
        let mut command = Command::new(compiler);
        command.args(["-O1", "-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-c"]);
        command.arg(&place).arg("-o").arg(&object);
        running.push(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")));
        objects.push(object);
    }
    running.into_iter().for_each(finish);
    let archive = out.join("libbeeline_emulated.a");
    let _ = fs::remove_file(&archive);
    let mut command = Command::new(env::var_os("AR").unwrap_or_else(|| "ar".into()));
    command.arg("crs").arg(&archive).args(&objects);
    finish(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")));
}

fn finish(mut child: Child) {
    let status = child.wait();
    assert!(matches!(&status, Ok(status) if status.success()), "the kernels: {status:?}");
}

/// The kernels of some modules, each entry under a name of its own.
fn source(kernels: &Path, unit: &str, modules: &[&Module]) -> String {
    let mut text = format!("#include {:?}\n", kernels.join("emulate/entries.h"));
    let mut table = String::new();
    for module in modules {
        let entries = entries(&module.source);
        if let Some((kind, operator)) = &module.of {
            let _ = writeln!(text, "#define TYPE {kind}\n#define OP {operator}");
        }
        for entry in &entries {
            let function = format!("{entry}_{}", module.name.replace('-', "_"));
            let _ = writeln!(text, "#define {entry} {function}");
            let _ = writeln!(table, "    EMULATED({:?}, {entry:?}, {function}),", module.name);
        }
        let _ = writeln!(text, "#include {:?}", module.source);
        for name in entries.iter().map(String::as_str).chain(["TYPE", "OP"]) {
            let _ = writeln!(text, "#undef {name}");
        }
    }
    let name = format!("beeline_emulated_{}", unit.to_lowercase());
    let _ = write!(
        text,
        "extern \"C\" {{\nextern const EmulatedEntry {name}[];\nconst EmulatedEntry {name}[] = {{\n{table}    {{}},\n}};\n}}\n"
    );
    text
}

/// The tables of all units, and the run of a block.
fn all<'a>(kernels: &Path, units: impl Iterator<Item = &'a str>) -> String {
    let mut text = format!("#include {:?}\nextern \"C\" {{\n", kernels.join("emulate/entries.h"));
    let mut list = String::new();
    for unit in units {
        let name = format!("beeline_emulated_{}", unit.to_lowercase());
        let _ = writeln!(text, "extern const EmulatedEntry {name}[];");
        let _ = write!(list, "{name}, ");
    }
    let _ =
        write!(text, "const EmulatedEntry *const beeline_emulated[] = {{{list}nullptr}};\n}}\n");
    let _ = writeln!(text, "#include {:?}", kernels.join("emulate/run.h"));
    text
}

/// The names of the entries that a source defines.
fn entries(source: &Path) -> Vec<String> {
    let text = fs::read_to_string(source).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    let name = |line: &str| {
        let at = line.strip_prefix("extern \"C\" __global__")?;
        let name = at.get(at.find("bl_")?..)?.split('(').next()?;
        Some(name.to_owned())
    };
    text.lines().filter_map(name).collect()
}

fn folder(variable: &str) -> PathBuf {
    env::var_os(variable).unwrap_or_else(|| panic!("cargo sets {variable}")).into()
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
