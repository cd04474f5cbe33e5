//! The main job on any machine: a model is made, loaded and verified.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use beeline_core::model::Dtype;
use beeline_core::model::write::HeaderBuilder;

use crate::{Outcome, cargo};

const SHARDS: u64 = 4;

/// `cargo xtask demo [MIB]`.
pub(crate) fn run(args: &[String]) -> Outcome {
    let mib = size(args)?;
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/demo-model");
    println!("making a model of {mib} MiB in {SHARDS} shards in target/demo-model");
    make(&folder, mib << 20).map_err(|error| format!("{}: {error}", folder.display()))?;
    println!("building and running `beeline load target/demo-model --verify`");
    let mut command = cargo();
    // Not quiet: the first build takes minutes, and says what it is at.
    command.args(["run", "--release", "--locked", "--package", "beeline-cli", "--", "load"]);
    crate::run(command.arg(folder).arg("--verify"))
}

fn size(args: &[String]) -> Result<u64, String> {
    match args {
        [] => Ok(1024),
        [mib] => mib
            .parse()
            .ok()
            .filter(|mib| (16..=65536).contains(mib))
            .ok_or_else(|| format!("'{mib}' is not a number of MiB between 16 and 65536")),
        _ => Err("usage: cargo xtask demo [MIB]".to_owned()),
    }
}

/// Writes the shards and their index: layers with a large odd-sized matrix and two small vectors each.
fn make(folder: &Path, bytes: u64) -> std::io::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let mut weights = Vec::new();
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let layers = 8;
        // 2 bytes an element, one element more than a multiple of 256 bytes: neighbours are unaligned.
        let width = 1024;
        let rows = bytes / SHARDS / layers / width / 2;
        let mut header = HeaderBuilder::new();
        let mut len = 0;
        for layer in 0..layers {
            let layer = shard * layers + layer;
            for (tensor, shape) in
                [("weight", vec![rows, width]), ("norm", vec![width + 1]), ("scale", vec![])]
            {
                let tensor = format!("layers.{layer}.{tensor}");
                len += 2 * shape.iter().product::<u64>();
                header = header.tensor(&tensor, Dtype::Bf16, &shape).map_err(other)?;
                weights.push(format!("\"{tensor}\":\"{name}\""));
            }
        }
        let mut file = std::io::BufWriter::new(fs::File::create(folder.join(&name))?);
        file.write_all(&header.build().map_err(other)?)?;
        write_noise(&mut file, shard, len)?;
        file.flush()?;
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", weights.join(","));
    fs::write(folder.join("model.safetensors.index.json"), index)
}

/// Bytes without a pattern, so that a misplaced piece shows.
fn write_noise(file: &mut impl Write, seed: u64, len: u64) -> std::io::Result<()> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ (seed + 1);
    let mut left = len;
    while left > 0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state.to_le_bytes();
        let take = left.min(8);
        file.write_all(word.get(..take as usize).unwrap_or(&word))?;
        left -= take;
    }
    Ok(())
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> std::io::Error {
    std::io::Error::other(error)
}
