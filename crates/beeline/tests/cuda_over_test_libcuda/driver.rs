//! The driver as another part of the program uses it: called directly, beside Beeline.

use std::ffi::{CString, c_char, c_void};

use libloading::os::unix::Library;

/// `libcuda.so.1` of this process.
pub struct Direct {
    library: Library,
}

impl Direct {
    /// Opens the library that Beeline finds, too; the loader hands out the same one.
    pub fn open() -> Self {
        // SAFETY: the test library runs no code when it is loaded.
        let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
        let direct = Self { library };
        assert_eq!(direct.call1("cuInit", 0), 0);
        direct
    }

    /// Calls a function of one number.
    pub fn call1(&self, name: &str, a: usize) -> i32 {
        // SAFETY: the tests name functions of one argument, which fits a register.
        let function = unsafe { self.library.get::<extern "C" fn(usize) -> i32>(name) }.unwrap();
        function(a)
    }

    /// Calls a function of up to six words; what it does not take is in registers that it does not read.
    pub fn call(&self, name: &str, arguments: &[usize]) -> i32 {
        type F = extern "C" fn(usize, usize, usize, usize, usize, usize) -> i32;
        let word = |at: usize| arguments.get(at).copied().unwrap_or(0);
        assert!(arguments.len() <= 6, "{name}");
        // SAFETY: the tests name functions of words alone, no more than are passed.
        let function = unsafe { self.library.get::<F>(name) }.unwrap();
        function(word(0), word(1), word(2), word(3), word(4), word(5))
    }

    /// [`Self::call`], which must succeed.
    pub fn done(&self, name: &str, arguments: &[usize]) {
        assert_eq!(self.call(name, arguments), 0, "{name} {arguments:x?}");
    }

    /// Begins a capture of a stream.
    pub fn begin(&self, stream: usize, mode: usize) {
        self.done("cuStreamBeginCapture_v2", &[stream, mode]);
    }

    /// Ends it; a graph of it that can be launched, or the code.
    pub fn end(&self, stream: usize) -> Result<usize, i32> {
        Ok(self.instance(self.end_graph(stream)?))
    }

    /// Ends it; the graph, or the code.
    pub fn end_graph(&self, stream: usize) -> Result<usize, i32> {
        let mut graph = 0_usize;
        match self.call("cuStreamEndCapture", &[stream, (&raw mut graph).expose_provenance()]) {
            0 => Ok(graph),
            code => Err(code),
        }
    }

    /// What can be launched of a graph, which is destroyed.
    pub fn instance(&self, graph: usize) -> usize {
        let mut exec = 0_usize;
        let place = (&raw mut exec).expose_provenance();
        self.done("cuGraphInstantiateWithFlags", &[place, graph, 0]);
        self.done("cuGraphDestroy", &[graph]);
        exec
    }

    pub fn destroy(&self, graphs: &[usize]) {
        graphs.iter().for_each(|graph| self.done("cuGraphExecDestroy", &[*graph]));
    }

    /// How many calls the test library has refused for the sake of a capture; another driver does not tell.
    pub fn refused(&self) -> i64 {
        // SAFETY: only looked for.
        let known = unsafe { self.library.get::<*const c_void>("beeline_test_cuda_counter") };
        if known.is_ok() { self.counter("refused") } else { 0 }
    }

    /// Waits for a stream.
    pub fn finish(&self, stream: usize) {
        self.done("cuStreamSynchronize", &[stream]);
    }

    /// Calls a function that answers one word through its first argument.
    pub fn ask(&self, name: &str, argument: usize) -> usize {
        type F = extern "C" fn(*mut usize, usize) -> i32;
        let mut answer = 0;
        // SAFETY: the tests name functions of a place for one word and a number.
        let function = unsafe { self.library.get::<F>(name) }.unwrap();
        assert_eq!(function(&raw mut answer, argument), 0, "{name}");
        answer
    }

    /// The primary context of a device, made current in this thread.
    pub fn push_primary(&self, device: usize) -> usize {
        let context = self.ask("cuDevicePrimaryCtxRetain", device);
        assert_eq!(self.call1("cuCtxPushCurrent_v2", context), 0);
        context
    }

    pub fn current(&self) -> usize {
        self.ask("cuCtxGetCurrent", 0)
    }

    /// What the test library counts under `name`.
    pub fn counter(&self, name: &str) -> i64 {
        type F = extern "C" fn(*const c_char) -> i64;
        let text = CString::new(name).unwrap();
        // SAFETY: a function of the test library that takes a C string.
        let function = unsafe { self.library.get::<F>("beeline_test_cuda_counter") }.unwrap();
        let count = function(text.as_ptr());
        assert!(count >= 0, "{name}");
        count
    }

    /// Arms a fault on device 0.
    pub fn fault(&self, site: &str, after: u64, effect: &str) {
        type F = extern "C" fn(*const c_char, u64, *const c_char) -> i32;
        let (site, effect) = (CString::new(site).unwrap(), CString::new(effect).unwrap());
        // SAFETY: a function of the test library that takes two C strings and a number.
        let function = unsafe { self.library.get::<F>("beeline_test_cuda_fault") }.unwrap();
        assert_eq!(function(site.as_ptr(), after, effect.as_ptr()), 0);
    }

    /// Lets stalled operations go on.
    pub fn release(&self) {
        assert_eq!(self.call1("beeline_test_cuda_release", 0), 0);
    }

    /// Managed memory of device 0.
    pub fn managed(&self, len: u64) -> u64 {
        type F = extern "C" fn(u64) -> u64;
        // SAFETY: a function of the test library that takes a number.
        let function = unsafe { self.library.get::<F>("beeline_test_cuda_managed") }.unwrap();
        function(len)
    }

    /// Exchanges this thread's capture mode.
    pub fn exchange_mode(&self, mode: i32) -> i32 {
        type F = extern "C" fn(*mut c_void) -> i32;
        let name = "cuThreadExchangeStreamCaptureMode";
        let mut place = mode;
        // SAFETY: a function of a place for one int.
        let function = unsafe { self.library.get::<F>(name) }.unwrap();
        assert_eq!(function((&raw mut place).cast()), 0);
        place
    }
}
