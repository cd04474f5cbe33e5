//! Modules: the entries of a PTX text, run as the simulated device's kernels of the same name, or (those of
//! collectives) by the CPU from the source that the text was compiled from.

use std::ffi::c_void;

use beeline::gpu::KernelArg;
use beeline::gpu::sim::KERNELS;

use crate::emulated::{self, Entry};
use crate::ffi::{Cu, In, Out, Text, export, read, write_text};
use crate::memory::words;
use crate::state::driver;

/// A module that was loaded.
pub(crate) struct Module {
    entries: Vec<String>,
    /// Which of the committed ones it is.
    name: Option<&'static str>,
}

/// What a function handle stands for.
#[derive(Clone)]
pub(crate) enum Function {
    /// A kernel of the simulated device.
    Named(String),
    /// One that the CPU runs.
    Emulated(Entry),
}

const JIT_ERROR_LOG_BUFFER: i32 = 5;
const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: i32 = 6;

export! {
    fn cuModuleLoadDataEx(
        module: Out<u64>, image: Text, count: u32, options: In<i32>, values: In<*mut c_void>,
    ) {
        let driver = driver()?;
        driver.current_unsafe()?;
        let text = image.read()?;
        if !text.lines().any(|line| line.starts_with(".version")) {
            let mut log = (std::ptr::null_mut(), 0);
            for index in 0..count as usize {
                match options.at(index)? {
                    JIT_ERROR_LOG_BUFFER => log.0 = values.at(index)?,
                    JIT_ERROR_LOG_BUFFER_SIZE_BYTES => log.1 = values.at(index)?.addr(),
                    _ => {}
                }
            }
            // A log is optional; what counts is the code.
            let _ = write_text(log.0.cast(), log.1, "fatal: missing .version directive");
            return Err(Cu::INVALID_PTX);
        }
        let name = |line: &str| Some(line.split_once(".entry ")?.1.split('(').next()?.to_owned());
        let entries = text.lines().filter(|line| !line.starts_with("//")).filter_map(name);
        let handle = driver.handle();
        let made = Module { entries: entries.collect(), name: emulated::module(&text) };
        driver.objects().modules.insert(handle, made);
        module.set(handle)
    }

    fn cuModuleUnload(module: u64) {
        driver()?.guard()?;
        driver()?.objects().modules.remove(&module).map(drop).ok_or(Cu::INVALID_HANDLE)
    }

    fn cuModuleGetFunction(function: Out<u64>, module: u64, name: Text) {
        let driver = driver()?;
        driver.current()?;
        let name = name.read()?;
        let mut objects = driver.objects();
        let loaded = objects.modules.get(&module).ok_or(Cu::INVALID_HANDLE)?;
        if !loaded.entries.contains(&name) { return Err(Cu::NOT_FOUND); }
        let emulated = loaded.name.and_then(|module| Entry::find(module, &name));
        let known = KERNELS.iter().any(|(known, _)| *known == name);
        let found = match emulated {
            Some(entry) => Function::Emulated(entry),
            None if known => Function::Named(name),
            None => return Err(Cu::NOT_FOUND),
        };
        let handle = driver.handle();
        objects.functions.insert(handle, found);
        function.set(handle)
    }

    fn cuFuncLoad(function: u64) {
        driver()?.guard()?;
        driver()?.objects().functions.get(&function).map(|_| ()).ok_or(Cu::INVALID_HANDLE)
    }

    fn cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
        block_z: u32, shared: u32, stream: u64, params: In<*mut c_void>, extra: *const c_void,
    ) {
        let driver = driver()?;
        driver.stream(stream)?;
        let threads = u64::from(grid_x) * u64::from(block_x);
        let flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
        if threads == 0 || !flat || shared > 48 << 10 || block_x > 1024 || !extra.is_null() {
            return Err(Cu::INVALID_VALUE);
        }
        let found = driver.objects().functions.get(&function).cloned();
        let name = match found.ok_or(Cu::INVALID_HANDLE)? {
            Function::Named(name) => name,
            Function::Emulated(entry) => {
                let arguments = entry.arguments(&params)?;
                let shape = (grid_x, block_x);
                return driver.submit(stream, move |stream| {
                    entry.launch(arguments.clone(), shape, stream)
                });
            }
        };
        let mut args = vec![KernelArg::Buffer(words(driver, &params, 0)?)];
        match name.as_str() {
            "add_u32" => args.push(KernelArg::Buffer(words(driver, &params, 2)?)),
            "atomic_u64" => {
                args.push(KernelArg::Buffer(words(driver, &params, 2)?));
                args.push(KernelArg::U32(read(params.at(4)?)?));
                args.push(KernelArg::U64(read(params.at(5)?)?));
                args.push(KernelArg::U64(read(params.at(6)?)?));
            }
            _ => args.push(KernelArg::U32(read(params.at(2)?)?)),
        }
        driver.submit(stream, move |stream| stream.launch(&name, &args))
    }
}
