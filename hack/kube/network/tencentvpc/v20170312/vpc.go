// Package v20170312 stands in for the SDK of a cloud, which the module proxy does not serve. Only flannel's backend
// tencent-vpc calls it; the tests use host-gw.
package v20170312

import "errors"

var errMissing = errors.New("this flannel is built without the backend tencent-vpc")

type Client struct{}

func NewClientWithSecretId(id, key, region string) (*Client, error) { return nil, errMissing }

func (*Client) DescribeRouteTables(*DescribeRouteTablesRequest) (*DescribeRouteTablesResponse, error) {
	return nil, errMissing
}
func (*Client) DeleteRoutes(*DeleteRoutesRequest) (*DeleteRoutesResponse, error) {
	return nil, errMissing
}
func (*Client) CreateRoutes(*CreateRoutesRequest) (*CreateRoutesResponse, error) {
	return nil, errMissing
}

type Filter struct {
	Name   *string
	Values []*string
}

type Route struct {
	RouteId, DestinationCidrBlock, GatewayType, GatewayId, RouteType *string
	Enabled                                                          *bool
}

type RouteTable struct {
	RouteTableId *string
	RouteSet     []*Route
}

type (
	DescribeRouteTablesRequest  struct{ Filters []*Filter }
	DescribeRouteTablesResponse struct {
		Response struct{ RouteTableSet []*RouteTable }
	}
	DeleteRoutesRequest struct {
		RouteTableId *string
		Routes       []*Route
	}
	DeleteRoutesResponse struct{}
	CreateRoutesRequest  struct {
		RouteTableId *string
		Routes       []*Route
	}
	CreateRoutesResponse struct{}
)

func NewDescribeRouteTablesRequest() *DescribeRouteTablesRequest {
	return &DescribeRouteTablesRequest{}
}
func NewDeleteRoutesRequest() *DeleteRoutesRequest { return &DeleteRoutesRequest{} }
func NewCreateRoutesRequest() *CreateRoutesRequest { return &CreateRoutesRequest{} }
