//! NVIDIA's run-time compiler, loaded when kernels are built: CUDA C++ in, PTX text out. No GPU is needed.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::{null, null_mut};

use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

type Program = *mut c_void;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> i32;
type Size = unsafe extern "C" fn(Program, *mut usize) -> i32;

/// Longest text that is taken from the compiler.
const TEXT_BYTES_MAX: usize = 64 << 20;

macro_rules! table {
    ($($name:ident: $type:ty;)*) => {
        #[expect(non_snake_case, reason = "the names of nvrtc.h")]
        struct Table { $($name: $type,)* }

        impl Table {
            fn load(dl: &Dl) -> Result<Self, Error> {
                Ok(Self { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the type is the signature that nvrtc.h gives the function of this name.
                    let found = unsafe { dl.get::<$type>(name.as_bytes()) };
                    *found.map_err(|_| Error(format!("{} is missing", stringify!($name))))?
                },)* })
            }
        }
    };
}

table! {
    nvrtcVersion: unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
    nvrtcCreateProgram: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char) -> i32;
    nvrtcDestroyProgram: unsafe extern "C" fn(*mut Program) -> i32;
    nvrtcCompileProgram: unsafe extern "C" fn(Program, i32, *const *const c_char) -> i32;
    nvrtcGetPTXSize: Size;
    nvrtcGetPTX: Text;
    nvrtcGetProgramLogSize: Size;
    nvrtcGetProgramLog: Text;
}

/// The compiler.
pub struct Nvrtc {
    table: Table,
    version: (i32, i32),
}

/// What went wrong, with the compiler's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl Nvrtc {
    /// Loads the compiler; its library of built-ins is looked for in the same folder first.
    ///
    /// # Errors
    /// Why it does not load.
    pub fn open(library: &Path) -> Result<Self, Error> {
        let folder = library.parent().and_then(|folder| std::fs::read_dir(folder).ok());
        for entry in folder.into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("libnvrtc-builtins.so") {
                // SAFETY: the compiler's own companion, which it would load itself by its bare name.
                let loaded = unsafe { Dl::open(Some(entry.path()), RTLD_NOW | RTLD_GLOBAL) };
                let _kept = loaded.map(ManuallyDrop::new);
            }
        }
        // SAFETY: NVIDIA's compiler; its initialisers have no requirements.
        let dl = unsafe { Dl::open(Some(library), RTLD_NOW | RTLD_LOCAL) };
        let dl = dl.map_err(|error| Error(format!("{}: {error}", library.display())))?;
        // Never unloaded: it keeps state of its own.
        let dl = ManuallyDrop::new(dl);
        let table = Table::load(&dl)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two places for one int each.
        let result = unsafe { (table.nvrtcVersion)(&raw mut major, &raw mut minor) };
        check("nvrtcVersion", result)?;
        Ok(Self { table, version: (major, minor) })
    }

    /// The CUDA version it belongs to.
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles `source`, called `name` in messages.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<String, Error> {
        let c = |text: &str| CString::new(text).map_err(|_| Error(format!("{name}: a zero byte")));
        let (source, title) = (c(source)?, c(name)?);
        let options: Vec<CString> = options.iter().map(|one| c(one)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|one| one.as_ptr()).collect();
        let mut program: Program = null_mut();
        let create = self.table.nvrtcCreateProgram;
        let place = &raw mut program;
        // SAFETY: a place for one program, two C strings that outlive the call, no headers.
        let made = unsafe { create(place, source.as_ptr(), title.as_ptr(), 0, null(), null()) };
        check("nvrtcCreateProgram", made)?;
        let program = Made { table: &self.table, program };
        let count = i32::try_from(pointers.len()).map_err(|_| Error("too many options".into()))?;
        let compile = self.table.nvrtcCompileProgram;
        // SAFETY: a live program and `count` C strings that outlive the call.
        let compiled = unsafe { compile(program.program, count, pointers.as_ptr()) };
        if compiled != 0 {
            let log =
                program.text(self.table.nvrtcGetProgramLogSize, self.table.nvrtcGetProgramLog);
            return Err(Error(format!("{name}: {}", log.unwrap_or_default())));
        }
        program.text(self.table.nvrtcGetPTXSize, self.table.nvrtcGetPTX)
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvrtc({}.{})", self.version.0, self.version.1)
    }
}

struct Made<'a> {
    table: &'a Table,
    program: Program,
}

impl Made<'_> {
    fn text(&self, size: Size, text: Text) -> Result<String, Error> {
        let mut len = 0;
        // SAFETY: a live program and a place for one size.
        check("size", unsafe { size(self.program, &raw mut len) })?;
        if len > TEXT_BYTES_MAX {
            return Err(Error(format!("the compiler answers {len} bytes")));
        }
        let mut bytes = vec![0_u8; len];
        // SAFETY: the compiler writes the `len` bytes that it announced, the last of them zero.
        check("text", unsafe { text(self.program, bytes.as_mut_ptr().cast()) })?;
        bytes.pop();
        String::from_utf8(bytes).map_err(|_| Error("the compiler's text is not UTF-8".into()))
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, destroyed once.
        let _ = unsafe { (self.table.nvrtcDestroyProgram)(&raw mut self.program) };
    }
}

fn check(call: &str, result: i32) -> Result<(), Error> {
    if result == 0 { Ok(()) } else { Err(Error(format!("{call} answered {result}"))) }
}
