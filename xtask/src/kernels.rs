//! The PTX of the kernels, and their protocols on CPU threads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use beeline_sys::nvrtc::Nvrtc;

use crate::{Outcome, output, run as run_command};

/// The compiler whose output is committed: PTX ISA 8.2, which every driver since CUDA 12.2 takes.
const VERSION: (i32, i32) = (12, 2);

/// Types, and the architecture that their kernels need.
const TYPES: &[(&str, &str)] = &[
    ("I8", "compute_80"),
    ("U8", "compute_80"),
    ("I32", "compute_80"),
    ("U32", "compute_80"),
    ("I64", "compute_80"),
    ("U64", "compute_80"),
    ("F16", "compute_80"),
    ("BF16", "compute_80"),
    ("F32", "compute_80"),
    ("F64", "compute_80"),
    // Their conversions are instructions of compute capability 9.0.
    ("E4M3", "compute_90"),
    ("E5M2", "compute_90"),
];
const OPERATORS: &[&str] = &["SUM", "PROD", "MIN", "MAX"];

/// `cargo xtask kernels [--check]`: writes `kernels/ptx` and `kernels/sm_90`, or compares them and runs the protocols on
/// CPU threads.
///
/// `BEELINE_NVRTC` names the compiler's library (`libnvrtc.so.12` of CUDA 12.2); without it the loader's path
/// is asked. `BEELINE_PTXAS` is the `ptxas` of CUDA 13.0 with `fatbinary` beside it; without it `PATH` is asked.
pub(crate) fn run(args: &[String]) -> Outcome {
    let check = args.iter().any(|arg| arg == "--check");
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    if check {
        emulate(&folder)?;
        machine_code(&folder, true)?;
    }
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(_) if check => {
            println!("SKIP nvrtc");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let mut different = Vec::new();
    let mut modules = vec![
        ("move".to_owned(), "move.cu", vec![("compute_80", None)]),
        ("peer".to_owned(), "peer.cu", vec![("compute_80", None)]),
        ("stage".to_owned(), "stage.cu", vec![("compute_70", None)]),
    ];
    for (name, architecture) in TYPES {
        for operator in OPERATORS {
            let module = format!("{name}-{operator}").to_lowercase();
            modules.push((module, "reduce.cu", vec![(*architecture, Some((*name, *operator)))]));
        }
    }
    for (module, source, variants) in modules {
        for (architecture, of) in variants {
            let ptx = compile(&compiler, &folder, source, architecture, of)?;
            let place = folder.join("ptx").join(format!("{module}.ptx"));
            if check {
                if fs::read_to_string(&place).ok().as_deref() != Some(ptx.as_str()) {
                    different.push(module.clone());
                }
            } else {
                fs::write(&place, ptx).map_err(|error| format!("{}: {error}", place.display()))?;
            }
        }
    }
    if different.is_empty() {
        println!("{} modules", 3 + TYPES.len() * OPERATORS.len());
        return if check { Ok(()) } else { machine_code(&folder, false) };
    }
    Err(format!("kernels/ptx is not what the sources give: {}", different.join(" ")))
}

/// The compiler that the committed PTX is written by.
fn compiler() -> Result<Nvrtc, String> {
    let library = std::env::var_os("BEELINE_NVRTC").unwrap_or_else(|| "libnvrtc.so.12".into());
    match Nvrtc::open(Path::new(&library)) {
        Ok(compiler) if compiler.version() == VERSION => Ok(compiler),
        Ok(other) => Err(format!("{other:?} found, CUDA {VERSION:?} needed")),
        Err(error) => Err(format!("{error}; set BEELINE_NVRTC")),
    }
}

/// The PTX of one source in `folder`, for one type and operator where it reduces.
fn compile(
    compiler: &Nvrtc,
    folder: &Path,
    source: &str,
    architecture: &str,
    of: Option<(&str, &str)>,
) -> Result<String, String> {
    let text = fs::read_to_string(folder.join(source)).map_err(|error| error.to_string())?;
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        format!("--include-path={}", folder.display()),
    ];
    if let Some((name, operator)) = of {
        options.extend([format!("-DTYPE={name}"), format!("-DOP={operator}")]);
    }
    compiler.compile(source, &text, &options).map(|ptx| renumbered(&ptx)).map_err(|e| e.to_string())
}

/// The compiler numbers calls in comments, on and on in one process: here from 0 in every module, so that a module does
/// not depend on those before it.
fn renumbered(ptx: &str) -> String {
    const MARK: &str = "callseq ";
    let mut parts = ptx.split(MARK);
    let mut text = parts.next().unwrap_or_default().to_owned();
    let mut known: Vec<&str> = Vec::new();
    for part in parts {
        let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, rest) = part.split_at(digits);
        let place = known.iter().position(|one| *one == number).unwrap_or_else(|| {
            known.push(number);
            known.len() - 1
        });
        text.push_str(&format!("{MARK}{place}{rest}"));
    }
    text
}

/// Writes into `into` what `kernels-bench FOLDER mutant` loads, from the sources in `folder`.
pub(crate) fn write_few(folder: &Path, into: &Path) -> Outcome {
    let compiler = compiler()?;
    let fail = |error: std::io::Error| format!("{}: {error}", into.display());
    fs::create_dir_all(into).map_err(fail)?;
    for (module, source, of) in
        [("move", "move.cu", None), ("f32-sum", "reduce.cu", Some(("F32", "SUM")))]
    {
        let ptx = compile(&compiler, folder, source, "compute_80", of)?;
        fs::write(into.join(module).with_extension("ptx"), ptx).map_err(fail)?;
    }
    Ok(())
}

/// The assembler whose output is committed.
const ASSEMBLER: &str = "V13.0.88";

/// Says of which PTX each file of machine code was made: a check that needs no assembler.
const ORIGINS: &str = "sm_90/origins.txt";

/// Modules that have machine code too: those of collectives, and of requests in stream order.
fn assembled() -> Vec<String> {
    let reductions = TYPES.iter().flat_map(|(name, _)| {
        OPERATORS.iter().map(move |operator| format!("{name}-{operator}").to_lowercase())
    });
    ["move", "stage"].map(str::to_owned).into_iter().chain(reductions).collect()
}

/// What the committed PTX is now, a line a module.
fn origins(folder: &Path) -> Result<String, String> {
    let mut all = String::new();
    for module in assembled() {
        let place = folder.join(format!("ptx/{module}.ptx"));
        let text = fs::read(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        // FNV-1a: against what somebody forgot, not against an enemy.
        let hash = text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        all.push_str(&format!("{module} {hash:016x}\n"));
    }
    Ok(all)
}

/// Writes, or compares, the machine code of all modules in use for compute capability 9.0, made of the committed PTX.
fn machine_code(folder: &Path, check: bool) -> Outcome {
    let origins = origins(folder)?;
    if check && fs::read_to_string(folder.join(ORIGINS)).ok() != Some(origins.clone()) {
        return Err(format!("kernels/{ORIGINS}: the machine code is of other PTX"));
    }
    let ptxas = PathBuf::from(std::env::var_os("BEELINE_PTXAS").unwrap_or_else(|| "ptxas".into()));
    match output(Command::new(&ptxas).arg("--version")) {
        Ok(text) if text.contains(ASSEMBLER) => {}
        Ok(_) | Err(_) if check => {
            println!("SKIP ptxas");
            return Ok(());
        }
        Ok(text) => return Err(format!("ptxas {ASSEMBLER} is needed, not {}", text.trim())),
        Err(error) => return Err(format!("{error}; set BEELINE_PTXAS")),
    }
    let work = std::env::temp_dir().join(format!("beeline-sm_90-{}", std::process::id()));
    let fail = |error: std::io::Error| format!("{}: {error}", work.display());
    fs::create_dir_all(&work).map_err(fail)?;
    fs::create_dir_all(folder.join("sm_90")).map_err(fail)?;
    let mut different = Vec::new();
    for module in assembled() {
        // The same names for all, in a folder of their own: nothing of the place is in what comes out.
        let ptx = fs::read_to_string(folder.join(format!("ptx/{module}.ptx")))
            .map_err(|e| e.to_string())?;
        fs::write(work.join("kernel.ptx"), for_9_0(&ptx)?).map_err(fail)?;
        let mut assemble = Command::new(&ptxas);
        output(assemble.current_dir(&work).args([
            "-arch=sm_90",
            "kernel.ptx",
            "-o",
            "kernel.cubin",
        ]))?;
        let mut pack = Command::new(ptxas.with_file_name("fatbinary"));
        pack.current_dir(&work).args(["--create=kernel.fatbin", "--compress-all"]);
        pack.args(["--compress-mode=size", "--image3=kind=elf,sm=90,file=kernel.cubin"]);
        output(&mut pack)?;
        let place = folder.join(format!("sm_90/{module}.fatbin"));
        let made = fs::read(work.join("kernel.fatbin")).map_err(fail)?;
        if !check {
            fs::write(&place, made).map_err(fail)?;
        } else if fs::read(&place).ok() != Some(made) {
            different.push(module);
        }
    }
    let _ = fs::remove_dir_all(&work);
    if !check {
        // Last: a run that ends early must not look like one that did not.
        let place = folder.join(ORIGINS);
        fs::write(&place, origins).map_err(|error| format!("{}: {error}", place.display()))?;
    }
    if different.is_empty() {
        return Ok(());
    }
    Err(format!("kernels/sm_90 is not what the PTX gives: {}", different.join(" ")))
}

/// The text of a collective's module for compute capability 9.0, with the instructions that only it has: behind marks in the
/// committed one (`after_earlier` and `admit_next` of `kernels/beeline/device.cuh`).
fn for_9_0(ptx: &str) -> Result<String, String> {
    const WAIT: &str = "//sm_90 griddepcontrol.wait;";
    const ADMIT: &str = "//sm_90 griddepcontrol.launch_dependents;";
    /// Of words by which blocks tell each other that they have their room; no kernel in front uses them.
    const MEETS: &str = "//before the wait";
    // The library launches its kernels of packets and of lines so that they need them.
    let early = |entry: &&str| ["bl_ll_", "bl_line_"].iter().any(|name| entry.starts_with(name));
    let chunks = |entry: &&str| entry.starts_with("bl_push_");
    if ptx.split(".entry ").skip(1).filter(chunks).any(|entry| entry.contains(ADMIT)) {
        return Err("a kernel of chunks lets the next one start".to_owned());
    }
    for entry in ptx.split(".entry ").skip(1).filter(early) {
        let name = entry.split('(').next().unwrap_or_default();
        let Some((before, after)) = entry.split_once(WAIT) else {
            return Err(format!("{name} does not wait for the kernel before it"));
        };
        let touches = |line: &str| {
            (line.contains(".global") && !line.contains(MEETS)) || line.contains("call")
        };
        if before.contains(ADMIT) || before.lines().any(touches) || !after.contains(ADMIT) {
            return Err(format!("{name} touches memory, or lets the next start, before its wait"));
        }
    }
    Ok(limited(ptx)?.replace("//sm_90 ", "").replace(".target sm_80", ".target sm_90"))
}

/// The text with a limit of registers for kernels of lines: two of their blocks that start early then find room on one
/// multiprocessor, and a tiny block beside them (`LINE_THREADS_FEW` of `crates/beeline-sys`). The compiler has no word for it.
fn limited(ptx: &str) -> Result<String, String> {
    const ANY: &str = "\n.minnctapersm 1\n";
    const LIMIT: &str = "\n.maxnreg 80\n";
    let mut entries = ptx.split(".entry ");
    let mut text = entries.next().unwrap_or_default().to_owned();
    for entry in entries {
        text.push_str(".entry ");
        match entry.split_once(ANY) {
            Some((head, body)) if entry.starts_with("bl_line_") => text.extend([head, LIMIT, body]),
            None if entry.starts_with("bl_line_") => {
                return Err("a kernel of lines has other bounds than its limit replaces".to_owned());
            }
            _ => text.push_str(entry),
        }
    }
    Ok(text)
}

/// Runs the kernels' own code on CPU threads against plain loops.
fn emulate(folder: &Path) -> Outcome {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    if output(Command::new(&compiler).arg("--version")).is_err() {
        println!("SKIP c++");
        return Ok(());
    }
    let (mut build, mut run) = emulation(folder, &std::env::temp_dir());
    run_command(&mut build)?;
    let outcome = run_command(&mut run);
    let _ = fs::remove_file(emulator(&std::env::temp_dir()));
    outcome
}

/// How the kernels of `folder` are built for CPU threads, into `into`, and how they are run then.
pub(crate) fn emulation(folder: &Path, into: &Path) -> (Command, Command) {
    let program = emulator(into);
    // What an earlier build left must not be run for one that failed.
    let _ = fs::remove_file(&program);
    let source = folder.join("emulate/main.cpp");
    let mut build = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    build.args(["-O1", "-std=c++17", "-pthread", "-o"]).arg(&program).arg(source).arg("-latomic");
    // A protocol that was broken may wait for ever.
    let mut run = Command::new("timeout");
    run.arg("600").arg(program);
    (build, run)
}

fn emulator(folder: &Path) -> PathBuf {
    folder.join(format!("beeline-kernels-{}", std::process::id()))
}
