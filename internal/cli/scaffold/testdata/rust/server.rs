// The parts of a gen/server.rs that `tripod component new` reads.

                pub fn send(&self, message: i64) -> ::core::result::Result<(), Status> {
                    unsafe {

                        #[link(wasm_import_module = "proto:shop-type/cart-streams")]
                        extern "C" {
                            #[link_name = "[method]google-protobuf-int64-value-writer.send"]

                pub fn send(
                    &self,
                    message: &Option,
                ) -> ::core::result::Result<(), Status> {
                    unsafe {

                        #[link(wasm_import_module = "proto:shop-type/cart-streams")]
                        extern "C" {
                            #[link_name = "[method]option-writer.send"]

                pub fn send(
                    &self,
                    message: &[u8],
                ) -> ::core::result::Result<(), Status> {
                    unsafe {

                        #[link(wasm_import_module = "proto:shop-type/cart-streams")]
                        extern "C" {
                            #[link_name = "[method]google-protobuf-bytes-value-writer.send"]

                pub trait Guest {
                    /// ! Match has a name that is a word of Rust.
                    #[allow(async_fn_in_trait)]
                    fn match_(
                        context: Context,
                        request: String,
                    ) -> ::core::result::Result<Option, Status>;
                    #[allow(async_fn_in_trait)]
                    fn watch(
                        context: Context,
                        request: String,
                        replies: &GoogleProtobufInt64ValueWriter,
                    ) -> ::core::result::Result<(), Status>;
                    #[allow(async_fn_in_trait)]
                    fn fill(
                        context: Context,
                        requests: &StringReader,
                    ) -> ::core::result::Result<String, Status>;
                    #[allow(async_fn_in_trait)]
                    fn talk(
                        context: Context,
                        requests: &StringReader,
                        replies: &OptionWriter,
                    ) -> ::core::result::Result<(), Status>;
                    #[allow(async_fn_in_trait)]
                    fn mirror(
                        context: Context,
                        requests: &OptionReader,
                        replies: &OptionWriter,
                    ) -> ::core::result::Result<(), Status>;
                    #[allow(async_fn_in_trait)]
                    fn repeat(
                        context: Context,
                        request: i64,
                        replies: &GoogleProtobufInt64ValueWriter,
                    ) -> ::core::result::Result<(), Status>;
                    #[allow(async_fn_in_trait)]
                    fn load(
                        context: Context,
                        request: Option,
                        replies: &GoogleProtobufBytesValueWriter,
                    ) -> ::core::result::Result<(), Status>;
                }
                #[doc(hidden)]
                macro_rules! __export_proto_shop_type_cart_cabi {

                pub trait Guest {
                    #[allow(async_fn_in_trait)]
                    fn answer_with_a_thing(
                        context: Context,
                        request: ShopV1Thing,
                    ) -> ::core::result::Result<ShopV1Thing, Status>;
                }
                #[doc(hidden)]
                macro_rules! __export_proto_shop_type_bindings_cabi {

                pub trait Guest {
                    #[allow(async_fn_in_trait)]
                    fn addresses_of_all(
                        context: Context,
                        request: Option,
                    ) -> ::core::result::Result<ShopV1Thing, Status>;
                }
                #[doc(hidden)]
                macro_rules! __export_proto_shop_type_types_of_things_that_are_old_cabi {

                pub trait Guest {
                    #[allow(async_fn_in_trait)]
                    fn add(
                        context: Context,
                        request: Thing,
                    ) -> ::core::result::Result<Thing, Status>;
                }
                #[doc(hidden)]
                macro_rules! __export_proto_shop_v1_cart_cabi {

macro_rules! __export_server_impl {
    ($ty:ident) => {
        self::export!($ty with_types_in self);
    };
    ($ty:ident with_types_in $($path_to_types_root:tt)*) => {
        $($path_to_types_root)*::
        exports::proto::shop_type::cart::__export_proto_shop_type_cart_cabi!($ty
        with_types_in $($path_to_types_root)*:: exports::proto::shop_type::cart);
        $($path_to_types_root)*::
        exports::proto::shop_type::bindings::__export_proto_shop_type_bindings_cabi!($ty
        with_types_in $($path_to_types_root)*:: exports::proto::shop_type::bindings);
        $($path_to_types_root)*::
        exports::proto::shop_type::types_of_things_that_are_old::__export_proto_shop_type_types_of_things_that_are_old_cabi!($ty
        with_types_in $($path_to_types_root)*::
        exports::proto::shop_type::types_of_things_that_are_old);
        $($path_to_types_root)*::
        exports::proto::shop_v1::cart::__export_proto_shop_v1_cart_cabi!($ty
        with_types_in $($path_to_types_root)*:: exports::proto::shop_v1::cart);
    };
}
